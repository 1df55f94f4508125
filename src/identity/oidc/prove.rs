//! The checks of one token, by one issuer.

use std::time::Duration;

use kiln_domain::Timestamp;
use kiln_domain::access::{Proven, Standing};
use kiln_token::{Token, shown, shown_within};

use super::keeper::{IssuerState, Keeper, NoKey};
use super::replay::{Memory, Seen};
use super::{ProveError, Verified, lanes, repository};
use crate::config::identity::{Issuer as Config, Replay};
use crate::identity::LONGEST_WHO;

pub(super) struct Issuer {
    config: Config,
    /// What stands before the names of its repositories.
    host: String,
    keeper: Keeper,
    seen: Memory,
}

/// Claims that tell an auditor which run it was, where they are.
const TOLD: [&str; 8] =
    ["ref", "event_name", "pipeline_source", "run_id", "pipeline_id", "job_id", "actor", "user_login"];

impl Issuer {
    pub(super) fn new(config: Config, host: String, keeper: Keeper) -> Self {
        Self { config, host, keeper, seen: Memory::default() }
    }

    /// What it proves, if anything.
    pub(super) async fn prove(&self, token: &Token<'_>, now: Timestamp) -> Result<Proven, ProveError> {
        if !self.config.algorithms.contains(&token.algorithm) {
            return Err(ProveError::Algorithm { issuer: self.name(), algorithm: token.algorithm });
        }
        self.check_dates(token, now)?;
        self.check_audience(token)?;
        let keys = self.keeper.keys_for(token).await.map_err(|error| match error {
            NoKey::Unknown => ProveError::UnknownKey { issuer: self.name(), algorithm: token.algorithm },
            NoKey::Unavailable { why, retry_after } => {
                ProveError::Unavailable { issuer: self.name(), why, retry_after: at_least_a_second(retry_after) }
            }
        })?;
        if !keys.verify(token) {
            return Err(ProveError::Signature { issuer: self.name() });
        }
        let repo = repository::repository(&self.config, &self.host, &token.claims)?;
        Ok(Proven { repo, trust: lanes::trust(&self.config, &token.claims) })
    }

    /// For the caller, once it is known that it may build.
    pub(super) fn verified(
        &self,
        token: &Token<'_>,
        proven: Proven,
        replay: Replay,
        now: Timestamp,
    ) -> Result<Verified, ProveError> {
        let expires = end(token)?;
        let jti = token.claims.text("jti").unwrap_or_default();
        let seen = self.seen.note(&jti, expires.plus(self.config.leeway), now);
        match (replay, seen) {
            (Replay::Note, _) | (Replay::Refuse, Seen::First) => {}
            (Replay::Refuse, Seen::Again) => return Err(ProveError::Replayed),
            (Replay::Refuse, Seen::Nameless) => return Err(ProveError::Nameless),
            (Replay::Refuse, Seen::Full) => {
                return Err(ProveError::Crowded { issuer: self.name(), retry_after: Duration::from_mins(1) });
            }
        }
        let who = self.who(token, &proven);
        Ok(Verified { standing: Standing::Build(proven), who, expires, is_repeated: seen == Seen::Again })
    }

    pub(super) fn state(&self) -> IssuerState {
        self.keeper.state(&self.config.issuer)
    }

    fn name(&self) -> String {
        self.config.issuer.clone()
    }

    fn check_dates(&self, token: &Token<'_>, now: Timestamp) -> Result<(), ProveError> {
        let late = now.as_millis() - end(token)?.plus(self.config.leeway).as_millis();
        if late >= 0 {
            return Err(ProveError::Expired(now.since(end(token)?).as_secs()));
        }
        for name in ["nbf", "iat"] {
            if let Some(begin) = token.claims.date(name)?.map(Timestamp::from_millis)
                && begin > now.plus(self.config.leeway)
            {
                return Err(ProveError::Early(begin.since(now).as_secs(), name));
            }
        }
        Ok(())
    }

    fn check_audience(&self, token: &Token<'_>) -> Result<(), ProveError> {
        let named = token.claims.audiences();
        if named.contains(&self.config.audience.as_str()) {
            return Ok(());
        }
        Err(ProveError::Audience { ours: self.config.audience.clone(), theirs: shown(&named.join(" ")) })
    }

    fn who(&self, token: &Token<'_>, proven: &Proven) -> String {
        let told = |name: &&str| {
            let text = token.claims.text(name).filter(|text| !text.is_empty())?;
            Some(format!(", {name} {}", shown(&text)))
        };
        let run: String = TOLD.iter().filter_map(told).collect();
        shown_within(&format!("a build of {}, by {}{run}", proven.repo, self.config.issuer), LONGEST_WHO - 3)
    }
}

fn end(token: &Token<'_>) -> Result<Timestamp, ProveError> {
    let end = token.claims.date("exp")?.ok_or(ProveError::NoDate("exp"))?;
    Ok(Timestamp::from_millis(end))
}

/// Nothing is asked again at once.
fn at_least_a_second(span: Duration) -> Duration {
    span.max(Duration::from_secs(1))
}
