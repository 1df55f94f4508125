//! What is measured. Each is a process of its own that knows one name and sends it to the backend.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fs, thread};

use async_trait::async_trait;
use kiln::gateway::{Directory, Door, Gateway, Limits, NoDoor};
use kiln_domain::Key;
use tokio_util::sync::CancellationToken;

use crate::Outcome;

pub(crate) const DOMAIN: &str = "builds.example.com";
pub(crate) const NAME: &str = "buildkitd-pbcce5b6205652dd7.builds.example.com";

/// More than any load has open, and few enough for the usual limit of descriptors.
const CONNECTIONS: usize = 6_000;

pub(crate) struct Proxy {
    pub(crate) name: &'static str,
    pub(crate) address: SocketAddr,
    process: Child,
    _files: Option<tempfile::TempDir>,
}

impl Proxy {
    /// This program, or another build of it, as a gateway.
    pub(crate) fn kiln(name: &'static str, program: &Path, backend: SocketAddrV4) -> Outcome<Self> {
        let mut command = Command::new(program);
        command.arg("--serve").arg(backend.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let output = process.stdout.take().ok_or("no output")?;
        let mut address = String::new();
        BufReader::new(output).read_line(&mut address)?;
        Ok(Self { name, address: address.trim().parse()?, process, _files: None })
    }

    /// Those of the three that are on this machine.
    pub(crate) fn installed(backend: SocketAddrV4) -> Outcome<Vec<Self>> {
        let mut found = Vec::new();
        for (name, program, arguments, configuration) in [
            ("HAProxy", "/usr/sbin/haproxy", &["-db", "-f"][..], haproxy as fn(u16, SocketAddrV4, &Path) -> String),
            ("nginx", "/usr/sbin/nginx", &["-c"], nginx),
            ("sniproxy", "/usr/sbin/sniproxy", &["-f", "-c"], sniproxy),
        ] {
            if Path::new(program).exists() {
                found.push(Self::other(name, program, arguments, configuration, backend)?);
            }
        }
        Ok(found)
    }

    fn other(
        name: &'static str,
        program: &str,
        arguments: &[&str],
        configuration: fn(u16, SocketAddrV4, &Path) -> String,
        backend: SocketAddrV4,
    ) -> Outcome<Self> {
        let files = tempfile::tempdir()?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let file = files.path().join("configuration");
        fs::write(&file, configuration(address.port(), backend, files.path()))?;
        let process = Command::new(program).args(arguments).arg(&file).stdin(Stdio::null()).spawn()?;
        let start = Instant::now();
        while TcpStream::connect(address).is_err() {
            if start.elapsed() > Duration::from_secs(5) {
                return Err(format!("{name} does not listen").into());
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(Self { name, address, process, _files: Some(files) })
    }

    /// Its processes: the one that was started, and its children.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let own = self.process.id();
        let children = fs::read_to_string(format!("/proc/{own}/task/{own}/children")).unwrap_or_default();
        std::iter::once(own).chain(children.split_whitespace().filter_map(|pid| pid.parse().ok())).collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // nginx ends its workers on SIGTERM only.
        if let Some(pid) = rustix::process::Pid::from_raw(self.process.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn haproxy(port: u16, backend: SocketAddrV4, _: &Path) -> String {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    format!(
        "global\n  maxconn {CONNECTIONS}\n  nbthread {threads}\ndefaults\n  mode tcp\n  option splice-auto\n  \
         timeout connect 5s\n  timeout client 1h\n  timeout server 1h\nfrontend in\n  bind 127.0.0.1:{port}\n  \
         tcp-request inspect-delay 5s\n  tcp-request content accept if {{ req.ssl_hello_type 1 }}\n  \
         use_backend out if {{ req.ssl_sni -i {NAME} }}\nbackend out\n  server backend {backend}\n"
    )
}

fn nginx(port: u16, backend: SocketAddrV4, directory: &Path) -> String {
    let directory = directory.display();
    // A module that Debian ships apart from the program.
    let module = "/usr/lib/nginx/modules/ngx_stream_module.so";
    let load = if Path::new(module).exists() { format!("load_module {module};\n") } else { String::new() };
    format!(
        "{load}daemon off;\nworker_processes auto;\nworker_rlimit_nofile 100000;\npid {directory}/pid;\nerror_log {directory}/log;\n\
         events {{ worker_connections {CONNECTIONS}; }}\nstream {{\n  map $ssl_preread_server_name $out {{ {NAME} {backend}; }}\n  \
         server {{ listen 127.0.0.1:{port} backlog=4096; ssl_preread on; proxy_pass $out; proxy_timeout 1h; }}\n}}\n"
    )
}

fn sniproxy(port: u16, backend: SocketAddrV4, directory: &Path) -> String {
    let (ip, to, directory) = (backend.ip(), backend.port(), directory.display());
    let name = NAME.replace('.', "\\\\.");
    format!(
        "pidfile {directory}/pid\nerror_log {{ filename {directory}/log }}\nlistener 127.0.0.1:{port} {{\n  protocol tls\n  table out\n}}\n\
         table out {{\n  {name} {ip}:{to}\n}}\n"
    )
}

/// Every name is at the backend.
struct Everything(SocketAddrV4);

#[async_trait]
impl Directory for Everything {
    async fn open(&self, _: &Key) -> Result<Door, NoDoor> {
        Ok(Door { address: self.0, held: Box::new(()) })
    }

    fn unreachable(&self, _: &Key) {}

    fn turned_away(&self, _: &Key, _: &str) {}
}

/// Until standard input ends.
pub(crate) fn serve(backend: SocketAddrV4) -> Outcome<()> {
    let limits = Limits {
        connections: CONNECTIONS,
        half_open: CONNECTIONS,
        per_project: CONNECTIONS,
        parked: CONNECTIONS,
        parked_bytes: usize::MAX,
        parked_per_project: CONNECTIONS,
        parked_bytes_per_project: usize::MAX,
        ..Limits::default()
    };
    more_descriptors();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let gateway = Arc::new(Gateway::new(Arc::new(Everything(backend)), &[DOMAIN.to_owned()], limits));
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))?;
    println!("{}", listener.local_addr()?);
    std::io::stdout().flush()?;
    runtime.spawn(gateway.serve(listener, CancellationToken::new()));
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

/// As many as this process may have.
pub(crate) fn more_descriptors() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
