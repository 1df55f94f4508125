//! The one place that asks for randomness.

use rustls::crypto::SecureRandom;

/// Where random bytes come from; simulations bring their own.
pub trait Entropy: Send + Sync + 'static {
    /// 8 unpredictable bytes.
    fn token(&self) -> Result<[u8; 8], NoEntropy>;
}

#[derive(Debug, thiserror::Error)]
#[error("the kernel gave no random bytes")]
pub struct NoEntropy;

/// The operating system's generator.
#[derive(Debug)]
pub struct SystemEntropy(&'static dyn SecureRandom);

impl Default for SystemEntropy {
    fn default() -> Self {
        Self(rustls::crypto::aws_lc_rs::default_provider().secure_random)
    }
}

impl Entropy for SystemEntropy {
    fn token(&self) -> Result<[u8; 8], NoEntropy> {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes).map_err(|_| NoEntropy)?;
        Ok(bytes)
    }
}
