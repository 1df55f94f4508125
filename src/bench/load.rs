//! The clients: each has one connection and asks again as soon as it is answered. A route's release is part of the work
//! and not of the latency.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use kiln_domain::Key;
use kiln_wire::{CompleteRequest, RouteResponse};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::BenchError;
use super::figures::Spread;

#[derive(Debug, Args)]
pub(super) struct Load {
    #[arg(long)]
    pub(super) socket: PathBuf,
    #[arg(long)]
    pub(super) clients: usize,
    #[arg(long)]
    pub(super) seconds: u64,
    /// Of the route request
    #[arg(long)]
    pub(super) body: String,
}

impl Load {
    pub(super) async fn run(&self) -> Result<(), BenchError> {
        let figures = serde_json::to_string(&Spread::of(self.latencies().await?));
        println!("{}", figures.map_err(|error| BenchError::Clients(error.to_string()))?);
        Ok(())
    }

    /// Of each route.
    pub(super) async fn latencies(&self) -> Result<Vec<Duration>, BenchError> {
        let until = Instant::now() + Duration::from_secs(self.seconds);
        let mut clients = JoinSet::new();
        for _ in 0..self.clients {
            clients.spawn(client(self.socket.clone(), Bytes::from(self.body.clone()), until));
        }
        let mut taken = Vec::new();
        while let Some(client) = clients.join_next().await {
            let client = client.map_err(|error| BenchError::Clients(error.to_string()))?;
            taken.extend(client.map_err(|error| BenchError::Load("reach the benchmark's server", error))?);
        }
        Ok(taken)
    }
}

async fn client(socket: PathBuf, body: Bytes, until: Instant) -> io::Result<Vec<Duration>> {
    let mut sender = connect(&socket).await?;
    let mut taken = Vec::new();
    while Instant::now() < until {
        taken.push(route_and_complete(&mut sender, body.clone()).await?.1);
    }
    Ok(taken)
}

/// The project's key, and what the route took.
pub(super) async fn route_and_complete(
    sender: &mut SendRequest<Full<Bytes>>,
    body: Bytes,
) -> io::Result<(Key, Duration)> {
    let start = Instant::now();
    let answer = ask(sender, "/route", body, StatusCode::OK).await?;
    let taken = start.elapsed();
    let RouteResponse { key, build_id, .. } = serde_json::from_slice(&answer)?;
    let complete = serde_json::to_vec(&CompleteRequest { key: key.to_string(), build_id })?;
    ask(sender, "/complete", Bytes::from(complete), StatusCode::NO_CONTENT).await?;
    Ok((key, taken))
}

pub(super) async fn connect(socket: &Path) -> io::Result<SendRequest<Full<Bytes>>> {
    let stream = UnixStream::connect(socket).await?;
    let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
    // Ends with its sender; an error in it is an error of the next request.
    tokio::spawn(connection);
    Ok(sender)
}

pub(super) async fn ask(
    sender: &mut SendRequest<Full<Bytes>>,
    path: &str,
    body: Bytes,
    expected: StatusCode,
) -> io::Result<Bytes> {
    let request = Request::post(path).header("host", "localhost").body(Full::new(body)).map_err(io::Error::other)?;
    // It may still be putting the last answer's end away.
    sender.ready().await.map_err(io::Error::other)?;
    let answer = sender.send_request(request).await.map_err(io::Error::other)?;
    let status = answer.status();
    let body = answer.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
    if status == expected {
        return Ok(body);
    }
    Err(io::Error::other(format!("{path} answered {status}: {}", String::from_utf8_lossy(&body))))
}
