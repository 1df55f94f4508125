//! The contract on datasets of ZFS, where the environment names one to make them in.

use super::*;

#[tokio::test]
async fn zfs_keeps_the_contract() {
    let Some(root) = ZfsRoot::new() else { return };
    let engine = ZfsEngine::at(&root.dataset, &root.path, &search_path(), clock()).await.expect("opened");
    contract(&engine, &OnDisk).await;
    assert!(root.contents().is_empty(), "everything was purged: {:?}", root.contents());
}
