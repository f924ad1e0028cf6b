//! One tenant: its quotas, and what it has used of them here. Each conductor counts for itself.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_placement::waiting::Priority;
use tokio::time::Instant;

use super::bucket::Bucket;

/// What a tenant may use; what is absent is not limited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Quotas {
    pub requests_per_minute: Option<u64>,
    /// Of prompts and answers together.
    pub tokens_per_minute: Option<u64>,
    pub running_requests_max: Option<u32>,
}

/// What a tenant is worth where requests wait for their turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    pub weight: u32,
    /// Of requests that ask for none.
    pub priority: Priority,
    /// The highest that they may ask for.
    pub priority_max: Priority,
}

impl Default for Standing {
    fn default() -> Self {
        let (priority, priority_max) = (Priority::Normal, Priority::Normal);
        Standing { weight: 1, priority, priority_max }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Tenant {
    name: Arc<str>,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    running: u32,
    running_max: Option<u32>,
    standing: Standing,
}

/// Which quota is used up, and when it is worth trying again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OverQuota {
    Requests {
        per_minute: u64,
        wait: Duration,
    },
    Tokens {
        per_minute: u64,
        wait: Duration,
    },
    /// Until one of the tenant's requests ends.
    Running {
        max: u32,
    },
}

impl OverQuota {
    /// For the metric.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            OverQuota::Requests { .. } => "requests_per_minute",
            OverQuota::Tokens { .. } => "tokens_per_minute",
            OverQuota::Running { .. } => "running_requests",
        }
    }
}

impl Tenant {
    pub(crate) fn new(name: Arc<str>) -> Tenant {
        Tenant { name, used: Mutex::default() }
    }

    /// What separates this tenant's blocks from those of all others: the server's choice, so that no
    /// client can name another's.
    pub(crate) fn salt(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    pub(crate) fn standing(&self) -> Standing {
        self.used().standing
    }

    pub(crate) fn set_standing(&self, standing: Standing) {
        self.used().standing = standing;
    }

    pub(crate) fn set_quotas(&self, quotas: Quotas) {
        self.set_quotas_at(quotas, Instant::now());
    }

    fn set_quotas_at(&self, quotas: Quotas, now: Instant) {
        let mut used = self.used();
        resize(&mut used.requests, quotas.requests_per_minute, now);
        resize(&mut used.tokens, quotas.tokens_per_minute, now);
        used.running_max = quotas.running_requests_max;
    }

    /// Lets a request in and counts it, or says what is used up. It runs until what comes back is
    /// dropped.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<Admission, OverQuota> {
        self.admit_at(Instant::now())
    }

    fn admit_at(self: &Arc<Self>, now: Instant) -> Result<Admission, OverQuota> {
        let mut used = self.used();
        if let Some(max) = used.running_max.filter(|max| used.running >= *max) {
            return Err(OverQuota::Running { max });
        }
        check_tokens(&mut used, 1, now)?;
        let mut taken = Taken::default();
        if let Some(requests) = &mut used.requests {
            if let Some(wait) = requests.wait(1, now) {
                return Err(OverQuota::Requests { per_minute: requests.per_minute(), wait });
            }
            requests.spend(1, now);
            taken.requests = 1;
        }
        used.running += 1;
        Ok(Admission { tenant: Arc::clone(self), taken: Mutex::new(taken) })
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn resize(bucket: &mut Option<Bucket>, per_minute: Option<u64>, now: Instant) {
    match (&mut *bucket, per_minute) {
        (Some(bucket), Some(per_minute)) => bucket.resize(per_minute, now),
        (_, per_minute) => *bucket = per_minute.map(|per_minute| Bucket::new(per_minute, now)),
    }
}

fn check_tokens(used: &mut Used, tokens: u64, now: Instant) -> Result<(), OverQuota> {
    let Some(bucket) = &mut used.tokens else { return Ok(()) };
    match bucket.wait(tokens, now) {
        None => Ok(()),
        Some(wait) => Err(OverQuota::Tokens { per_minute: bucket.per_minute(), wait }),
    }
}

/// One request of a tenant.
#[derive(Debug)]
pub(crate) struct Admission {
    tenant: Arc<Tenant>,
    /// Locked before the tenant.
    taken: Mutex<Taken>,
}

/// What a request has taken of its tenant's quotas.
#[derive(Debug, Default)]
struct Taken {
    requests: u64,
    tokens: u64,
    /// It was all given back: what still comes is for nobody.
    is_void: bool,
    /// Work was done for it that counts, whatever comes of it.
    is_spent: bool,
}

impl Admission {
    /// The prompt's tokens, before anything is done for them. A prompt that is longer than a minute's
    /// worth is let in when nothing was used for a minute.
    pub(crate) fn take_prompt(&self, tokens: u64) -> Result<(), OverQuota> {
        self.take_prompt_at(tokens, Instant::now())
    }

    /// Tokens of an answer as they come: nobody knows before how many there will be, so that they
    /// may leave a debt.
    pub(crate) fn spend(&self, tokens: u64) {
        self.spend_at(tokens, Instant::now());
    }

    /// Tokens that came in vain: they will come once more.
    pub(crate) fn give_back(&self, tokens: u64) {
        self.give_back_at(tokens, Instant::now());
    }

    /// What was taken is not given back, whatever the request gets: others have worked for it.
    pub(crate) fn is_spent(&self) {
        self.taken().is_spent = true;
    }

    /// The request got an error and nothing of an answer: it uses nothing.
    pub(crate) fn give_all_back(&self) {
        self.give_all_back_at(Instant::now());
    }

    fn take_prompt_at(&self, tokens: u64, now: Instant) -> Result<(), OverQuota> {
        let (mut taken, mut used) = (self.taken(), self.tenant.used());
        check_tokens(&mut used, tokens, now)?;
        if let Some(bucket) = &mut used.tokens {
            bucket.spend(tokens, now);
            taken.tokens += tokens;
        }
        Ok(())
    }

    fn spend_at(&self, tokens: u64, now: Instant) {
        let mut taken = self.taken();
        if taken.is_void {
            return;
        }
        if let Some(bucket) = &mut self.tenant.used().tokens {
            bucket.spend(tokens, now);
            taken.tokens += tokens;
        }
    }

    fn give_back_at(&self, tokens: u64, now: Instant) {
        let mut taken = self.taken();
        let tokens = tokens.min(taken.tokens);
        taken.tokens -= tokens;
        if let Some(bucket) = &mut self.tenant.used().tokens {
            bucket.give_back(tokens, now);
        }
    }

    fn give_all_back_at(&self, now: Instant) {
        let mut taken = self.taken();
        if taken.is_spent {
            return;
        }
        let none = Taken { is_void: true, ..Taken::default() };
        let Taken { requests, tokens, .. } = std::mem::replace(&mut *taken, none);
        let mut used = self.tenant.used();
        if let Some(bucket) = &mut used.requests {
            bucket.give_back(requests, now);
        }
        if let Some(bucket) = &mut used.tokens {
            bucket.give_back(tokens, now);
        }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.tenant.used().running -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(quotas: Quotas, now: Instant) -> Arc<Tenant> {
        let tenant = Arc::new(Tenant::new("t".into()));
        tenant.set_quotas_at(quotas, now);
        tenant
    }

    #[test]
    fn requests_at_once_are_counted_until_they_end() {
        let now = Instant::now();
        let tenant = tenant(Quotas { running_requests_max: Some(2), ..Quotas::default() }, now);
        let first = tenant.admit_at(now).expect("room");
        let _second = tenant.admit_at(now).expect("room");
        assert_eq!(tenant.admit_at(now).expect_err("full"), OverQuota::Running { max: 2 });
        drop(first);
        let _third = tenant.admit_at(now).expect("room again");
    }

    #[test]
    fn a_request_that_is_refused_uses_nothing() {
        let now = Instant::now();
        let quotas = Quotas {
            requests_per_minute: Some(2),
            tokens_per_minute: Some(60),
            running_requests_max: None,
        };
        let tenant = tenant(quotas, now);
        let first = tenant.admit_at(now).expect("the first");
        first.tenant.used().tokens.as_mut().expect("limited").spend(120, now);
        let wait = Duration::from_secs(61);
        for _ in 0..3 {
            let refused = tenant.admit_at(now).expect_err("in debt");
            assert_eq!(refused, OverQuota::Tokens { per_minute: 60, wait });
        }
        let later = now + wait;
        let _second = tenant.admit_at(later).expect("the second, and the third");
        let _third = tenant.admit_at(later).expect("which has come back meanwhile");
    }

    #[test]
    fn what_gets_an_error_gives_back_all_it_took() {
        let now = Instant::now();
        let quotas = Quotas {
            requests_per_minute: Some(2),
            tokens_per_minute: Some(60),
            running_requests_max: None,
        };
        let tenant = tenant(quotas, now);
        let kept = tenant.admit_at(now).expect("the first");
        kept.take_prompt_at(10, now).expect("room");
        let failed = tenant.admit_at(now).expect("the second");
        failed.take_prompt_at(20, now).expect("room");
        failed.spend_at(100, now);
        assert!(tenant.admit_at(now).is_err(), "in debt");
        failed.give_back_at(30, now);
        failed.give_all_back_at(now);
        failed.give_all_back_at(now);
        // Another answer of the same request, on its way when the first one failed.
        failed.spend_at(40, now);
        failed.give_back_at(40, now);
        let next = tenant.admit_at(now).expect("the second again");
        let over = next.take_prompt_at(51, now).expect_err("ten are used");
        assert_eq!(over, OverQuota::Tokens { per_minute: 60, wait: Duration::from_secs(1) });
        next.take_prompt_at(50, now).expect("no more than ten are used");
        let wait = Duration::from_secs(1);
        assert_eq!(
            tenant.admit_at(now).expect_err("none"),
            OverQuota::Tokens { per_minute: 60, wait }
        );
    }

    #[test]
    fn new_quotas_keep_what_was_used() {
        let now = Instant::now();
        let with = |requests| Quotas { requests_per_minute: requests, ..Quotas::default() };
        let tenant = tenant(with(Some(1)), now);
        let admission = tenant.admit_at(now).expect("one");
        tenant.set_quotas_at(with(Some(6)), now);
        let refused = tenant.admit_at(now).expect_err("it was used");
        let wait = Duration::from_secs(10);
        assert_eq!(refused, OverQuota::Requests { per_minute: 6, wait });
        tenant.set_quotas_at(with(None), now);
        drop(admission);
        assert!(tenant.admit_at(now).is_ok(), "no limit");
    }
}
