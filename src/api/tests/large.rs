//! Clients that ask for large answers and do not read them.

use super::super::large::LARGE;
use super::*;

/// More than the kernel takes for a client that does not read.
const MUCH: usize = 8 << 20;

/// It has the beginning of its answer, and reads no more.
async fn unread(server: &Server) -> UnixStream {
    let mut stream = server.connect().await;
    stream.write_all(request("GET", "/v1/projects", "").as_bytes()).await.expect("sends");
    let mut begun = [0; 15];
    stream.read_exact(&mut begun).await.expect("is answered");
    assert_eq!(&begun, b"HTTP/1.1 200 OK");
    stream
}

#[tokio::test]
async fn lists_that_nobody_reads_are_few() {
    let server = Server::with(FakeHeart { padding: MUCH, ..FakeHeart::default() }).await;
    let mut stalled = Vec::new();
    for _ in 0..LARGE {
        stalled.push(unread(&server).await);
    }
    let (projects, orphans, trash) =
        tokio::join!(server.get("/v1/projects"), server.get("/v1/orphans"), server.get("/v1/trash"));
    for answer in [projects, orphans, trash] {
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{answer:?}");
        assert!(answer.json::<kiln_wire::ApiError>().error.contains("do not read"), "{answer:?}");
    }
    for path in ["/healthz", "/metrics", &format!("/v1/projects/{}", view().key)] {
        assert_eq!(server.get(path).await.status, 200, "{path}");
    }
    assert_eq!(server.post("/route", BODY).await.status, 200);
    // One goes away, one reads to its end: each makes room for one.
    drop(stalled.pop());
    let next = unread(&server).await;
    assert_eq!(server.get("/v1/projects").await.status, 503);
    stalled[0].read_to_end(&mut Vec::new()).await.expect("reads");
    assert!(server.get("/v1/projects").await.body.len() > MUCH);
    drop(next);
}
