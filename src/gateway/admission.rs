//! How many connections may be open, of whom, and how far they have come; and which of them has to go for another.
//!
//! ```text
//!   admit ─▶ half-open ──said_hello──▶ parked ──reached──▶ relayed ─▶ (dropped)
//!            in all, and                in all and of a project, in number and bytes
//!            of one source              ╰─ of one address and of one project ─╯
//! ```
//!
//! When all places are taken, a newcomer gets that of the newest connection that no daemon has answered yet: half-open
//! ones first, then parked ones. Whoever holds places without using them loses them, and what is relayed never does.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kiln_domain::Key;
use tokio::time::Instant;

use super::live::{Connection, Live, State, Stop};
use super::{Limits, Refusal, source_of};

pub(super) struct Admission(Arc<Shared>);

struct Shared {
    limits: Limits,
    now: Mutex<Now>,
}

#[derive(Default)]
struct Now {
    next_id: u64,
    /// Without those that were shed and are about to go.
    open: usize,
    live: BTreeMap<u64, Arc<Live>>,
    /// By age, as ids only grow.
    half_open: BTreeMap<u64, Arc<Live>>,
    parked: BTreeMap<u64, Arc<Live>>,
    parked_bytes: usize,
    /// The maps below have only what has any, so they are never larger than what is open.
    half_open_of: HashMap<IpAddr, usize>,
    named_of: HashMap<IpAddr, usize>,
    projects: HashMap<Key, OfProject>,
    closed: HashSet<Key>,
}

#[derive(Default)]
struct OfProject {
    named: usize,
    parked: usize,
    parked_bytes: usize,
}

/// A place among the open connections, given back when dropped.
pub(super) struct Admitted {
    all: Arc<Shared>,
    live: Arc<Live>,
    half_open_from: Option<IpAddr>,
    named_from: Option<IpAddr>,
    parked_bytes: Option<usize>,
}

impl Admission {
    pub(super) fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared { limits, now: Mutex::default() }))
    }

    /// `speaks_for_others`: it is a load balancer, which will say whom for; see [`Admitted::comes_from`].
    pub(super) fn admit(&self, peer: SocketAddr, speaks_for_others: bool) -> Result<Admitted, Refusal> {
        let source = (!speaks_for_others).then(|| source_of(peer.ip()));
        let (mut now, limits) = (self.0.lock(), &self.0.limits);
        if let Some(source) = source {
            now.check_source(source, limits)?;
        }
        if now.half_open.len() >= limits.half_open {
            return Err(Refusal::TooManyHalfOpen);
        }
        if now.open >= limits.connections && !now.shed() {
            return Err(Refusal::TooManyConnections);
        }
        now.next_id += 1;
        let live = Arc::new(Live::new(now.next_id, peer));
        now.open += 1;
        now.live.insert(live.id, Arc::clone(&live));
        now.half_open.insert(live.id, Arc::clone(&live));
        if let Some(source) = source {
            *now.half_open_of.entry(source).or_default() += 1;
        }
        Ok(Admitted { all: Arc::clone(&self.0), live, half_open_from: source, named_from: None, parked_bytes: None })
    }

    pub(super) fn states(&self) -> Vec<(State, u64)> {
        let mut counts = State::ALL.map(|state| (state, 0));
        for live in self.0.lock().live.values() {
            if let Some((_, count)) = counts.get_mut(live.state() as usize) {
                *count += 1;
            }
        }
        counts.to_vec()
    }

    pub(super) fn connections(&self) -> Vec<Connection> {
        // What they say is read without the lock.
        let live: Vec<Arc<Live>> = self.0.lock().live.values().cloned().collect();
        let now = Instant::now();
        live.iter().map(|live| live.show(now)).collect()
    }

    pub(super) fn stop_all(&self, why: Stop) {
        for live in self.0.lock().live.values() {
            live.stop(why);
        }
    }

    /// Returns how many connections it ended.
    pub(super) fn close(&self, key: &Key) -> usize {
        let mut now = self.0.lock();
        now.closed.insert(key.clone());
        now.live.values().filter(|live| live.key() == Some(key) && live.stop(Stop::Closed)).count()
    }

    /// False: it was not closed.
    pub(super) fn open(&self, key: &Key) -> bool {
        self.0.lock().closed.remove(key)
    }
}

impl Shared {
    /// Nothing panics while it is held, and counters would still be right if something did.
    fn lock(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Admitted {
    pub(super) fn live(&self) -> &Arc<Live> {
        &self.live
    }

    /// A load balancer has said whom it speaks for.
    pub(super) fn comes_from(&mut self, client: SocketAddr) -> Result<(), Refusal> {
        let source = source_of(client.ip());
        let mut now = self.all.lock();
        now.check_source(source, &self.all.limits)?;
        *now.half_open_of.entry(source).or_default() += 1;
        self.half_open_from = Some(source);
        self.live.speaks_for(client);
        Ok(())
    }

    /// It has said its name, in a hello of so many bytes, and waits for its daemon.
    pub(super) fn said_hello(&mut self, key: &Key, bytes: usize) -> Result<(), Refusal> {
        let address = source_of(self.live.from().ip());
        let mut now = self.all.lock();
        if now.closed.contains(key) {
            return Err(Refusal::NameClosed);
        }
        now.check_named(address, key, bytes, &self.all.limits)?;
        now.end_half_open(self.live.id, self.half_open_from.take());
        *now.named_of.entry(address).or_default() += 1;
        now.parked.insert(self.live.id, Arc::clone(&self.live));
        now.parked_bytes += bytes;
        let project = now.projects.entry(key.clone()).or_default();
        project.named += 1;
        project.parked += 1;
        project.parked_bytes += bytes;
        self.named_from = Some(address);
        self.parked_bytes = Some(bytes);
        self.live.is_for(key);
        self.live.enter(State::Parked);
        Ok(())
    }

    /// Its daemon has answered. `Err`: its place was given away, or its name closed, in the meantime.
    pub(super) fn reached(&mut self) -> Result<(), Stop> {
        let mut now = self.all.lock();
        // Under the lock, so that it is either shed or relayed.
        if let Some(stop) = self.live.stop_reason() {
            return Err(stop);
        }
        now.end_parked(&self.live, self.parked_bytes.take());
        self.live.enter(State::Relaying);
        Ok(())
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut now = self.all.lock();
        now.end_half_open(self.live.id, self.half_open_from.take());
        now.end_parked(&self.live, self.parked_bytes.take());
        if let Some(address) = self.named_from.take() {
            now.end_named(address, &self.live);
        }
        now.live.remove(&self.live.id);
        if self.live.stop_reason() != Some(Stop::Shed) {
            now.open -= 1;
        }
    }
}

impl Now {
    fn check_source(&self, source: IpAddr, limits: &Limits) -> Result<(), Refusal> {
        // Loopback is not one client: tunnels and runners of this host all come from there.
        let full = of(&self.half_open_of, source) >= limits.half_open_per_source && !source.is_loopback();
        if full { Err(Refusal::TooManyFromSource) } else { Ok(()) }
    }

    fn check_named(&self, address: IpAddr, key: &Key, bytes: usize, limits: &Limits) -> Result<(), Refusal> {
        let none = OfProject::default();
        let project = self.projects.get(key).unwrap_or(&none);
        if of(&self.named_of, address) >= limits.per_address && !address.is_loopback() {
            return Err(Refusal::TooManyFromAddress);
        }
        if project.named >= limits.per_project {
            return Err(Refusal::TooManyOfProject);
        }
        if project.parked >= limits.parked_per_project
            || project.parked_bytes.saturating_add(bytes) > limits.parked_bytes_per_project
        {
            return Err(Refusal::TooManyParkedOfProject);
        }
        if self.parked.len() >= limits.parked || self.parked_bytes.saturating_add(bytes) > limits.parked_bytes {
            return Err(Refusal::TooManyParked);
        }
        Ok(())
    }

    /// False: everything that is open is relayed.
    fn shed(&mut self) -> bool {
        loop {
            let Some((_, newest)) = self.half_open.pop_last().or_else(|| self.parked.pop_last()) else { return false };
            // One that ends already gives its place back by itself.
            if newest.stop(Stop::Shed) {
                self.open -= 1;
                return true;
            }
        }
    }

    fn end_half_open(&mut self, id: u64, source: Option<IpAddr>) {
        self.half_open.remove(&id);
        if let Some(source) = source {
            one_less(&mut self.half_open_of, source);
        }
    }

    fn end_parked(&mut self, live: &Live, bytes: Option<usize>) {
        let Some(bytes) = bytes else { return };
        self.parked.remove(&live.id);
        self.parked_bytes -= bytes;
        if let Some(project) = live.key().and_then(|key| self.projects.get_mut(key)) {
            project.parked -= 1;
            project.parked_bytes -= bytes;
        }
    }

    fn end_named(&mut self, address: IpAddr, live: &Live) {
        one_less(&mut self.named_of, address);
        let Some(key) = live.key() else { return };
        if let Some(project) = self.projects.get_mut(key) {
            project.named -= 1;
            if project.named == 0 {
                self.projects.remove(key);
            }
        }
    }
}

fn of(counts: &HashMap<IpAddr, usize>, address: IpAddr) -> usize {
    counts.get(&address).copied().unwrap_or(0)
}

fn one_less(counts: &mut HashMap<IpAddr, usize>, address: IpAddr) {
    if let Some(count) = counts.get_mut(&address) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: usize = 500;

    fn from(text: &str) -> SocketAddr {
        SocketAddr::new(text.parse().expect("an address"), 40_000)
    }

    fn key(last: u8) -> Key {
        format!("pbcce5b6205652d{last:02x}").parse().expect("a key")
    }

    fn limits() -> Limits {
        Limits { connections: 100, half_open: 100, half_open_per_source: 100, ..Limits::default() }
    }

    fn admit(admission: &Admission, source: &str) -> Result<Admitted, Refusal> {
        admission.admit(from(source), false)
    }

    fn parked(admission: &Admission, source: &str, of: u8) -> Result<Admitted, Refusal> {
        let mut admitted = admit(admission, source)?;
        admitted.said_hello(&key(of), HELLO)?;
        Ok(admitted)
    }

    fn relayed(admission: &Admission, source: &str, of: u8) -> Admitted {
        let mut admitted = parked(admission, source, of).expect("room");
        admitted.reached().expect("not stopped");
        admitted
    }

    #[track_caller]
    fn assert_empty(admission: &Admission) {
        let now = admission.0.lock();
        let counts = (now.open, now.live.len(), now.half_open.len(), now.parked.len(), now.parked_bytes);
        assert_eq!(counts, (0, 0, 0, 0, 0));
        assert_eq!((now.half_open_of.len(), now.named_of.len(), now.projects.len()), (0, 0, 0));
    }

    #[test]
    fn each_limit_holds_and_places_are_given_back() {
        let limits = Limits { connections: 3, half_open: 2, half_open_per_source: 1, ..Limits::default() };
        let admission = Admission::new(limits);
        let refusal = |source| admit(&admission, source).err();
        let mut first = admit(&admission, "192.0.2.1").expect("room");
        assert_eq!(refusal("192.0.2.1"), Some(Refusal::TooManyFromSource));
        assert_eq!(refusal("::ffff:192.0.2.1"), Some(Refusal::TooManyFromSource));
        let mut second = admit(&admission, "2001:db8::1").expect("room");
        assert_eq!(refusal("192.0.2.3"), Some(Refusal::TooManyHalfOpen));
        first.said_hello(&key(1), HELLO).expect("room");
        assert_eq!(refusal("2001:db8::2"), Some(Refusal::TooManyFromSource), "the same /64");
        let mut third = admit(&admission, "192.0.2.1").expect("the first is not half-open any more");
        for admitted in [&mut first, &mut second, &mut third] {
            if admitted.live.state() == State::Hello {
                admitted.said_hello(&key(1), HELLO).expect("room");
            }
            admitted.reached().expect("not stopped");
        }
        assert_eq!(refusal("192.0.2.4"), Some(Refusal::TooManyConnections));
        drop((first, second, third));
        drop((admit(&admission, "127.0.0.1").expect("room"), admit(&admission, "127.0.0.1").expect("room")));
        assert_empty(&admission);
    }

    #[test]
    fn the_newest_that_no_daemon_answered_goes_for_a_newcomer() {
        let admission = Admission::new(Limits { connections: 4, ..limits() });
        let old = admit(&admission, "192.0.2.1").expect("room");
        let waits = parked(&admission, "192.0.2.2", 1).expect("room");
        let builds = relayed(&admission, "192.0.2.3", 1);
        let newer = admit(&admission, "192.0.2.4").expect("room");
        let places = || [&old, &waits, &builds, &newer].map(|admitted| admitted.live.stop_reason());
        let (kept, shed) = (None, Some(Stop::Shed));
        let mut late = relayed(&admission, "192.0.2.5", 1);
        assert_eq!(places(), [kept, kept, kept, shed], "the newest without a hello");
        let more = [relayed(&admission, "192.0.2.6", 1), relayed(&admission, "192.0.2.7", 1)];
        assert_eq!(places(), [shed, shed, kept, shed], "then the older one, then what waits");
        assert_eq!(admit(&admission, "192.0.2.8").err(), Some(Refusal::TooManyConnections), "builds are not shed");
        assert_eq!(late.reached(), Ok(()));
        drop((old, waits, builds, newer, late, more));
        assert_empty(&admission);
    }

    #[test]
    fn one_that_was_shed_is_not_relayed_after_all() {
        let admission = Admission::new(Limits { connections: 1, ..limits() });
        let mut waits = parked(&admission, "192.0.2.2", 1).expect("room");
        let newcomer = admit(&admission, "192.0.2.3").expect("its place");
        assert_eq!(waits.reached(), Err(Stop::Shed));
        drop((waits, newcomer));
        assert_empty(&admission);
    }

    #[test]
    fn an_address_and_a_project_have_their_shares() {
        let admission = Admission::new(Limits { per_address: 2, per_project: 3, ..limits() });
        let mut held = vec![relayed(&admission, "192.0.2.1", 1), relayed(&admission, "192.0.2.1", 1)];
        assert_eq!(parked(&admission, "192.0.2.1", 2).err(), Some(Refusal::TooManyFromAddress));
        held.push(relayed(&admission, "192.0.2.2", 1));
        assert_eq!(parked(&admission, "192.0.2.3", 1).err(), Some(Refusal::TooManyOfProject));
        held.extend((2..9).map(|of| relayed(&admission, "127.0.0.1", of)));
        held.remove(0);
        held.push(relayed(&admission, "192.0.2.1", 1));
        drop(held);
        assert_empty(&admission);
    }

    #[test]
    fn what_waits_is_bounded_in_number_and_bytes_for_each_project_and_in_all() {
        let of_one = Limits { parked_per_project: 2, parked_bytes_per_project: 3 * HELLO, ..limits() };
        let admission = Admission::new(Limits { parked: 4, parked_bytes: 5 * HELLO, ..of_one });
        let mut held = vec![parked(&admission, "192.0.2.1", 1).expect("room")];
        let mut large = admit(&admission, "192.0.2.1").expect("room");
        assert_eq!(large.said_hello(&key(1), 2 * HELLO + 1), Err(Refusal::TooManyParkedOfProject));
        assert_eq!(large.said_hello(&key(1), 2 * HELLO), Ok(()));
        assert_eq!(parked(&admission, "192.0.2.1", 1).err(), Some(Refusal::TooManyParkedOfProject));
        held.push(parked(&admission, "192.0.2.1", 2).expect("others have theirs"));
        let mut fourth = admit(&admission, "192.0.2.1").expect("room");
        assert_eq!(fourth.said_hello(&key(3), 2 * HELLO), Err(Refusal::TooManyParked));
        assert_eq!(fourth.said_hello(&key(3), HELLO), Ok(()));
        assert_eq!(parked(&admission, "192.0.2.1", 4).err(), Some(Refusal::TooManyParked));
        large.reached().expect("not stopped");
        held.push(parked(&admission, "192.0.2.1", 4).expect("one waits no longer"));
        drop((held, large, fourth));
        assert_empty(&admission);
    }

    #[test]
    fn a_load_balancer_is_counted_as_whom_it_speaks_for() {
        let admission = Admission::new(Limits { half_open_per_source: 1, per_address: 1, ..limits() });
        let through = || admission.admit(from("10.0.0.1"), true).expect("a load balancer has no limit of its own");
        let (mut first, mut second, third) = (through(), through(), through());
        assert_eq!(first.comes_from(from("192.0.2.1")), Ok(()));
        assert_eq!(first.live.from(), from("192.0.2.1"));
        assert_eq!(second.comes_from(from("192.0.2.1")), Err(Refusal::TooManyFromSource));
        assert_eq!(second.live.from(), from("10.0.0.1"));
        first.said_hello(&key(1), HELLO).expect("room");
        assert_eq!(second.comes_from(from("192.0.2.1")), Ok(()));
        assert_eq!(second.said_hello(&key(2), HELLO), Err(Refusal::TooManyFromAddress));
        drop((first, second, third));
        assert_empty(&admission);
    }

    #[test]
    fn a_closed_name_ends_what_it_has_and_takes_no_more() {
        let admission = Admission::new(limits());
        let (mut mine, others) =
            (parked(&admission, "192.0.2.1", 1).expect("room"), relayed(&admission, "192.0.2.1", 2));
        let build = relayed(&admission, "192.0.2.1", 1);
        assert_eq!(admission.close(&key(1)), 2);
        assert_eq!(admission.close(&key(1)), 0, "they are told once");
        assert_eq!((mine.reached(), build.live.stop_reason()), (Err(Stop::Closed), Some(Stop::Closed)));
        assert_eq!(others.live.stop_reason(), None);
        assert_eq!(parked(&admission, "192.0.2.1", 1).err(), Some(Refusal::NameClosed));
        assert!(admission.open(&key(1)) && !admission.open(&key(1)));
        drop((mine, others, build, parked(&admission, "192.0.2.1", 1).expect("open again")));
        assert_empty(&admission);
    }
}
