//! A real issuer of ours over TLS, which can lie and be slow. Its answers are bytes, so that it can say what no server would.

use std::collections::HashMap;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer as Authority};
use rustls::pki_types::PrivateKeyDer;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_util::task::AbortOnDropHandle;

use super::*;
use crate::identity::oidc::fetch::Web;

#[derive(Clone)]
enum Answer {
    /// Bytes, and the end.
    Says(String),
    /// Takes the question and says no more than this.
    Stalls(String),
    /// Goes on for ever.
    Floods,
}

struct Server {
    address: String,
    answers: Arc<Mutex<HashMap<String, Answer>>>,
    asked: Arc<Mutex<Vec<String>>>,
    ca: String,
    _task: AbortOnDropHandle<()>,
}

const DISCOVERY: &str = "/.well-known/openid-configuration";

fn ok(body: &Value) -> Answer {
    let body = body.to_string();
    Answer::Says(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
}

impl Server {
    /// With GitHub's habits, where nothing else is said.
    async fn start() -> Self {
        let authority_key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = params.self_signed(&authority_key).expect("an authority").pem();
        let key = KeyPair::generate().expect("a key");
        let leaf = CertificateParams::new(vec!["localhost".to_owned()]).expect("parameters");
        let leaf = leaf.signed_by(&key, &Authority::new(params, authority_key)).expect("a certificate");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let private = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![leaf.der().clone()], private)
            .expect("a server");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = format!("https://localhost:{}", listener.local_addr().expect("bound").port());
        let answers = Arc::new(Mutex::new(HashMap::new()));
        let asked = Arc::default();
        let task = tokio::spawn(serve(
            listener,
            TlsAcceptor::from(Arc::new(config)),
            Arc::clone(&answers),
            Arc::clone(&asked),
        ));
        let server = Self { address, answers, asked, ca, _task: AbortOnDropHandle::new(task) };
        server.on(DISCOVERY, ok(&json!({"issuer": server.address, "jwks_uri": format!("{}/keys", server.address)})));
        server.on("/keys", ok(&json!({"keys": [one().jwk()]})));
        server
    }

    fn on(&self, path: &str, answer: Answer) {
        self.answers.lock().expect("sound").insert(path.to_owned(), answer);
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().expect("sound").clone()
    }

    fn config(&self) -> IssuerConfig {
        issuer(&format!("kind = 'github'\nissuer = '{}'\nhost = 'github.com'", self.address))
    }

    fn token(&self) -> String {
        one().sign(&claims(&self.address, &json!({})))
    }

    /// What comes of a token, where the issuer has not long to answer; and why it failed, if it did.
    async fn prove(&self) -> (Result<Verified, ProveError>, Option<String>) {
        let (_dir, ca_file) = temporary(&self.ca);
        let config = config(vec![IssuerConfig { ca_file: Some(ca_file), ..self.config() }]);
        let mut roots = roots::Roots::default();
        let verifier = Verifier::with(&config, clock(), |issuer| {
            Ok(Box::new(Web::new(roots.for_issuer(issuer).expect("roots")).within(Duration::from_millis(1500))))
        });
        let verifier = verifier.expect("sound");
        (verifier.prove(&self.token()).await, verifier.issuers()[0].failure.clone())
    }

    /// Why it could not be asked, which is not for the caller.
    async fn why(&self) -> String {
        let (Err(error), Some(why)) = self.prove().await else { panic!("it was proven") };
        assert!(
            matches!(error.refusal(), Refusal::Unavailable { retry_after } if retry_after >= Duration::from_secs(1))
        );
        assert!(error.to_string().ends_with("it could not be reached, or did not answer as it should"), "{error}");
        assert!(why.len() < 410, "{why}");
        why
    }
}

async fn serve(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    answers: Arc<Mutex<HashMap<String, Answer>>>,
    asked: Arc<Mutex<Vec<String>>>,
) {
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((connection, _)) = listener.accept().await {
        let (acceptor, answers, asked) = (acceptor.clone(), Arc::clone(&answers), Arc::clone(&asked));
        connections.spawn(async move {
            // One that does not trust us goes here.
            let Ok(mut stream) = acceptor.accept(connection).await else { return };
            let mut question = Vec::new();
            while !question.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => question.push(byte),
                    Err(_) => return,
                }
            }
            let question = String::from_utf8(question).expect("text");
            let path = question.split(' ').nth(1).expect("a path").to_owned();
            let answer = answers.lock().expect("sound").get(&path).cloned();
            asked.lock().expect("sound").push(question);
            match answer {
                Some(Answer::Says(text)) => {
                    // The other side may have had enough.
                    let _ = stream.write_all(text.as_bytes()).await;
                    let _ = stream.shutdown().await;
                }
                Some(Answer::Stalls(text)) => {
                    stream.write_all(text.as_bytes()).await.expect("written");
                    stream.flush().await.expect("written");
                    std::future::pending::<()>().await;
                }
                Some(Answer::Floods) => {
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await;
                    while stream.write_all(&[b' '; 4096]).await.is_ok() {}
                }
                None => {
                    let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await;
                }
            }
        });
    }
}

#[tokio::test]
async fn a_token_is_proven_by_keys_that_came_over_tls() {
    let server = Server::start().await;
    let (_dir, ca_file) = temporary(&server.ca);
    let config = config(vec![IssuerConfig { ca_file: Some(ca_file), ..server.config() }]);
    let verifier = Verifier::start(&config, clock()).expect("sound");
    let proven = build(verifier.prove(&server.token()).await);
    assert_eq!(proven, ("github.com/socialgouv/foo".to_owned(), Trust::Trusted));
    verifier.prove(&server.token()).await.expect("from memory");
    let asked = server.asked();
    assert_eq!(asked.len(), 2, "{asked:?}");
    assert!(asked[0].starts_with(&format!("GET {DISCOVERY} HTTP/1.1\r\n")), "{asked:?}");
    assert!(asked[0].contains(&format!("host: {}\r\n", &server.address["https://".len()..])), "{asked:?}");
    let state = &verifier.issuers()[0];
    assert_eq!((state.keys, &state.failure), (1, &None));
}

#[tokio::test]
async fn an_issuer_whose_certificate_is_nobody_s_is_not_believed() {
    let (server, other) = (Server::start().await, Server::start().await);
    let (_dir, ca_file) = temporary(&other.ca);
    let config = config(vec![IssuerConfig { ca_file: Some(ca_file), ..server.config() }]);
    let verifier = Verifier::start(&config, clock()).expect("sound");
    verifier.prove(&server.token()).await.expect_err("not trusted");
    let why = verifier.issuers()[0].failure.clone().expect("a failure");
    assert!(why.contains("ca_file"), "{why}");
    assert_eq!(server.asked(), Vec::<String>::new());
}

#[tokio::test]
async fn a_ca_file_that_cannot_be_used_is_said_at_the_start() {
    let server = Server::start().await;
    let with = |path: PathBuf| {
        let config = config(vec![IssuerConfig { ca_file: Some(path), ..server.config() }]);
        crate::causes::in_one_line(&Verifier::start(&config, clock()).expect_err("refused"))
    };
    assert!(with("/nonexistent/ca.pem".into()).contains("cannot read ca_file /nonexistent/ca.pem"));
    for text in ["", "no PEM", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let (_dir, path) = temporary(text);
        assert!(with(path).contains("no certificate that can be used"), "{text}");
    }
}

/// An issuer that lies is told from one that answers, and nothing of its lies is followed.
#[tokio::test]
async fn an_issuer_that_lies_proves_nothing() {
    let (server, other) = (Server::start().await, Server::start().await);
    let document = |issuer: &str, keys: &str| ok(&json!({"issuer": issuer, "jwks_uri": keys}));
    let keys = format!("{}/keys", server.address);
    server.on(DISCOVERY, document(&other.address, &keys));
    assert!(server.why().await.contains("of another issuer"));
    server.on(DISCOVERY, document(&format!("{}/", server.address), &keys));
    assert!(server.why().await.contains("of another issuer"), "to the letter");
    for elsewhere in [
        &format!("{}/keys", other.address),
        "https://localhost/keys",
        "http://127.0.0.1/keys",
        "https://169.254.169.254/latest",
        "file:///etc/passwd",
        "/keys",
        &keys.replace("https", "http"),
        &keys.replace("localhost", "user@localhost"),
        &keys.replace("localhost", "127.0.0.1"),
    ] {
        server.on(DISCOVERY, document(&server.address, elsewhere));
        let why = server.why().await;
        assert!(why.contains("not where it is itself"), "{elsewhere}: {why}");
    }
    assert_eq!(other.asked(), Vec::<String>::new());
    server.on(DISCOVERY, document(&server.address, &keys));
    server.on("/keys", ok(&json!({"keys": [Signer { id: "one", key: two().key }.jwk()]})));
    let (forged, _) = server.prove().await;
    assert!(matches!(forged, Err(ProveError::Signature { .. })), "keys of another: {forged:?}");
    for (path, answer) in [(DISCOVERY, json!([])), (DISCOVERY, json!({"issuer": 7})), ("/keys", json!({"keys": {}}))] {
        let before = server.answers.lock().expect("sound")[path].clone();
        server.on(path, ok(&answer));
        let why = server.why().await;
        assert!(why.contains("discovery document is not one") || why.contains("keys cannot be read"), "{why}");
        server.on(path, before);
    }
    server.on("/keys", ok(&json!({"keys": "\u{202e}x".repeat(5000)})));
    assert!(server.why().await.is_ascii());
    let many = vec![one().jwk(); 129];
    server.on("/keys", ok(&json!({"keys": many})));
    assert!(server.why().await.contains("129 keys"));
}

#[tokio::test]
async fn keys_at_another_host_where_the_configuration_says_so() {
    let (server, other) = (Server::start().await, Server::start().await);
    server.on(DISCOVERY, ok(&json!({"issuer": server.address, "jwks_uri": format!("{}/keys", other.address)})));
    let (_dir, ca_file) = temporary(&format!("{}{}", server.ca, other.ca));
    let jwks_host = Some(other.address["https://".len()..].to_owned());
    let config = config(vec![IssuerConfig { ca_file: Some(ca_file), jwks_host, ..server.config() }]);
    let verifier = Verifier::start(&config, clock()).expect("sound");
    verifier.prove(&server.token()).await.expect("proven");
    assert_eq!((server.asked().len(), other.asked().len()), (1, 1));
}

#[tokio::test]
async fn redirects_and_errors_are_not_followed() {
    let (server, other) = (Server::start().await, Server::start().await);
    let says = |text: &str| Answer::Says(text.to_owned());
    for (answer, expected) in [
        (format!("HTTP/1.1 302 Found\r\nlocation: {}{DISCOVERY}\r\ncontent-length: 0\r\n\r\n", other.address), "302"),
        (format!("HTTP/1.1 301 Moved\r\nlocation: {}/there\r\ncontent-length: 0\r\n\r\n", server.address), "301"),
        ("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n".to_owned(), "503"),
        ("HTTP/1.1 204 No Content\r\n\r\n".to_owned(), "204"),
        ("SSH-2.0-OpenSSH_9.2\r\n".to_owned(), "broke off"),
        ("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{".to_owned(), "broke off"),
        (format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n{{}}", "y".repeat(100_000)), "broke off"),
        (String::new(), "broke off"),
    ] {
        server.on(DISCOVERY, says(&answer));
        let why = server.why().await;
        assert!(why.contains(expected), "{answer}: {why}");
    }
    assert_eq!(other.asked(), Vec::<String>::new());
}

#[tokio::test]
async fn documents_without_an_end_are_cut_off() {
    let server = Server::start().await;
    for path in ["/keys", DISCOVERY] {
        server.on(path, Answer::Floods);
        assert!(server.why().await.contains("more than"), "{path}");
    }
    server.on(DISCOVERY, Answer::Says(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", u64::MAX)));
    let why = server.why().await;
    assert!(why.contains("more than") || why.contains("broke off"), "{why}");
}

/// W9: a silent issuer has a deadline at each place where it can be silent.
#[tokio::test]
async fn w9_an_issuer_that_stalls_is_given_up() {
    let server = Server::start().await;
    for text in ["", "HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"] {
        server.on(DISCOVERY, Answer::Stalls(text.to_owned()));
        let why = server.why().await;
        assert!(why.contains("did not answer within 1.5s"), "{text}: {why}");
    }
    // One that takes connections and says nothing, not even hello.
    let mute = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = format!("https://localhost:{}", mute.local_addr().expect("bound").port());
    let place = Place::parse(&address).expect("a place");
    let (_dir, ca_file) = temporary(&server.ca);
    let tls = roots::Roots::default().for_issuer(&IssuerConfig { ca_file: Some(ca_file), ..server.config() });
    let web = Web::new(tls.expect("roots")).within(Duration::from_millis(200));
    let error = web.get(&place, 100).await.expect_err("silent");
    assert!(matches!(error, FetchError::Slow { .. }), "{error}");
    drop(mute);
    let error = web.get(&place, 100).await.expect_err("nobody there");
    assert!(matches!(error, FetchError::Connect { .. }), "{error}");
}
