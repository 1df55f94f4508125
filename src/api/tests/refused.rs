//! Routes that wait a while for a daemon that somebody has to mend first, over the real projects and a model host.

use kiln_domain::admission::HostLoad;
use kiln_domain::plan::Step;

use super::*;
use crate::clock::SystemClock;
use crate::entropy::SystemEntropy;
use crate::pki::Pki;
use crate::projects::model::{ModelEffects, Mood};
use crate::projects::{Addressing, Foundations, Projects, ProjectsConfig};

pub(super) struct Kiln {
    directory: TempDir,
    pub(super) host: Arc<ModelEffects>,
    store: Store,
    shutdown: CancellationToken,
}

impl Drop for Kiln {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

impl Kiln {
    pub(super) async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub(super) async fn with(change: impl FnOnce(&mut ProjectsConfig)) -> Self {
        let directory = TempDir::new().expect("a temporary directory");
        let host = Arc::new(ModelEffects::default());
        let store = Store::open(&directory.path().join("kiln.db")).expect("opens");
        let addressing = Addressing {
            domain: "kiln.internal".to_owned(),
            gateway_address: None,
            gateway_port: 1234,
            namespace: "kiln".to_owned(),
        };
        let addresses = kiln_domain::AddressPool {
            first: std::net::Ipv4Addr::new(127, 88, 0, 1),
            last: std::net::Ipv4Addr::new(127, 88, 0, 9),
        };
        let foundations = Foundations {
            store: store.clone(),
            effects: host.clone(),
            pki: Pki::new(directory.path()).expect("certificates"),
            clock: Arc::new(SystemClock),
            entropy: Arc::new(SystemEntropy::default()),
        };
        let mut config = ProjectsConfig::with_defaults(addresses, addressing);
        change(&mut config);
        let projects = Projects::new(config, foundations);
        let shutdown = CancellationToken::new();
        drop(projects.start(shutdown.clone()).await.expect("starts"));
        let door = Listener::unix(&directory.path().join("kiln.sock")).expect("listens");
        let callers = Arc::new(Callers::of_one_user(store.clone()));
        let api = Api::new(Arc::new(projects.clone()), callers, store.clone(), projects.metrics(), SETTINGS);
        tokio::spawn(serve(vec![door], api, shutdown.clone()));
        Self { directory, host, store, shutdown }
    }

    pub(super) async fn post(&self, path: &str, body: &str) -> Answer {
        self.send("POST", path, body).await
    }

    pub(super) async fn send(&self, method: &str, path: &str, body: &str) -> Answer {
        let stream = UnixStream::connect(self.directory.path().join("kiln.sock")).await.expect("connects");
        exchange(stream, &request(method, path, body)).await
    }

    async fn leases(&self) -> usize {
        self.store.all_leases().await.expect("reads").len()
    }

    /// Of a lease that goes with its answer.
    async fn no_lease_is_left(&self) {
        let gone = async {
            while self.leases().await > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        assert!(tokio::time::timeout(PATIENCE, gone).await.is_ok(), "the lease of an answer that was an error stays");
    }
}

#[tokio::test]
async fn a_start_that_is_refused_is_503_with_the_reason_however_short_the_wait() {
    let kiln = Kiln::start().await;
    kiln.host.set_load(HostLoad { storage: Some(99.0), ..HostLoad::default() });
    for path in ["/route?wait=9", "/route"] {
        let answer = kiln.post(path, BODY).await;
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("2")), "{path}: {answer:?}");
        assert!(answer.is_plain() && answer.body.contains("99 % full"), "{path}: {answer:?}");
        kiln.no_lease_is_left().await;
    }
}

#[tokio::test]
async fn a_start_that_failed_is_500_with_the_reason_however_short_the_wait() {
    let kiln = Kiln::start().await;
    kiln.host.set_mood(Mood::Failing(Step::StartInstance));
    for path in ["/route?wait=9", "/route"] {
        let answer = kiln.post(path, BODY).await;
        assert_eq!((answer.status, answer.header("retry-after")), (500, None), "{path}: {answer:?}");
        assert!(answer.is_plain() && answer.body.contains("the model says so"), "{path}: {answer:?}");
        kiln.no_lease_is_left().await;
    }
}

#[tokio::test]
async fn a_lease_that_its_client_knows_stays_when_a_later_poll_is_an_error() {
    let kiln = Kiln::start().await;
    kiln.host.set_mood(Mood::Failing(Step::StartInstance));
    // However short its wait is, a first poll is an error, too, if the start has failed by then: so it does not get there.
    let permits = kiln.host.gate.forget_permits(usize::MAX);
    let first = kiln.post("/route?wait=0", BODY).await;
    assert_eq!(first.status, 202, "{first:?}");
    kiln.host.gate.add_permits(permits);
    let RouteResponse { key, build_id, .. } = first.json();
    let build_id = build_id.expect("a lease");
    let again = format!(r#"{{"repo":"github.com/org/repo","arch":"amd64","buildId":"{build_id}"}}"#);
    let failed = kiln.post("/route?wait=9", &again).await;
    assert_eq!(failed.status, 500, "{failed:?}");
    assert!(failed.body.contains("the model says so"), "{failed:?}");
    assert_eq!(kiln.leases().await, 1);
    // It is mended, and the client that came again has what it asked for; unless that lease has begun a try of its own before.
    kiln.host.set_mood(Mood::Obedient);
    let polls = async {
        loop {
            let answer = kiln.post("/route?wait=9", &again).await;
            if !answer.body.contains("the model says so") {
                return answer;
            }
        }
    };
    let warm = tokio::time::timeout(PATIENCE, polls).await.expect("it does not fail for ever");
    assert_eq!(warm.status, 200, "{warm:?}");
    assert_eq!(warm.json::<RouteResponse>().build_id.as_ref(), Some(&build_id));
    let done = kiln.post("/complete", &format!(r#"{{"key":"{key}","buildId":"{build_id}"}}"#)).await;
    assert_eq!((done.status, kiln.leases().await), (204, 0));
}
