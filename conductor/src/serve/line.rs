//! Where requests wait for their turn, when tenants share the cluster: the shell around
//! [`kvasir_placement::waiting`]. One line for each model; a request holds a [`Ticket`] of it.
//!
//! One of a line is called at a time. It tries to be placed, and then goes, or is set aside so that the
//! next one is called. Those that were set aside are called again a moment later: instances end work and
//! say so all the time, and predictions change by waiting alone. A ticket that is dropped has left.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_placement::waiting::{Aside, Line, LineFull, LineOptions, Priority, Waiter, WaiterId};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// Between two looks at those that were set aside.
const AGAIN: Duration = Duration::from_millis(10);

/// How requests wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WaitOptions {
    pub line: LineOptions,
    /// A request goes when its prefill is predicted to begin within so long.
    pub ahead: Duration,
}

/// What a request may claim among others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Claim {
    pub tenant: Arc<str>,
    pub weight: u32,
    pub priority: Priority,
}

/// Another tenant's request has taken its place.
#[derive(Debug)]
pub(super) struct Displaced;

/// See the module.
#[derive(Debug)]
pub(super) struct Lines {
    options: WaitOptions,
    metrics: Arc<Metrics>,
    began: Instant,
    lines: Mutex<ByModel>,
    /// Somebody was set aside.
    aside: Notify,
}

/// A line is there while anybody waits in it.
#[derive(Debug, Default)]
struct ByModel {
    lines: BTreeMap<Arc<str>, OneLine>,
    tickets: u64,
}

#[derive(Debug)]
struct OneLine {
    line: Line,
    called: Option<WaiterId>,
    calls: BTreeMap<WaiterId, Arc<Notify>>,
}

impl OneLine {
    fn call_next(&mut self, now_us: u64) {
        if self.called.is_none() {
            self.called = self.line.next(now_us);
            if let Some(call) = self.called.and_then(|id| self.calls.get(&id)) {
                call.notify_one();
            }
        }
    }

    /// It is called no more, and waits no more.
    fn forget(&mut self, id: WaiterId) {
        self.calls.remove(&id);
        if self.called == Some(id) {
            self.called = None;
        }
    }
}

impl Lines {
    pub(super) fn new(options: WaitOptions, metrics: Arc<Metrics>) -> Lines {
        let (began, lines, aside) = (Instant::now(), Mutex::default(), Notify::new());
        Lines { options, metrics, began, lines, aside }
    }

    /// How long a prefill may be predicted to wait at an instance for a request to go that has waited for
    /// so long here. Where others keep instances busy who do not wait, it goes in the end.
    fn ahead_us(&self, waited: Duration) -> u64 {
        let ahead = self.options.ahead.max(waited / 8);
        u64::try_from(ahead.as_micros()).unwrap_or(u64::MAX)
    }

    /// Calls those again that were set aside, until `shutdown`.
    pub(super) async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let again = async {
            loop {
                self.aside.notified().await;
                sleep(AGAIN).await;
                let mut lines = self.lock();
                // Not before: who has entered meanwhile came earlier than now.
                let now_us = self.now_us();
                for line in lines.lines.values_mut() {
                    line.line.resume();
                    line.call_next(now_us);
                }
            }
        };
        let _ = shutdown.run_until_cancelled(again).await;
    }

    /// Puts all requests of these costs into the line of a model, or none of them.
    ///
    /// # Errors
    /// [`LineFull`] when there is no place for all of them.
    pub(super) fn enter(
        self: &Arc<Self>,
        model: &Arc<str>,
        claim: &Claim,
        costs_tokens: &[u64],
    ) -> Result<Vec<Ticket>, LineFull> {
        let mut lines = self.lock();
        let now_us = self.now_us();
        let ByModel { lines, tickets } = &mut *lines;
        let options = self.options.line;
        let line = lines.entry(Arc::clone(model)).or_insert_with(|| OneLine {
            line: Line::new(options),
            called: None,
            calls: BTreeMap::new(),
        });
        // So that nobody is displaced for a request of several that does not get in itself.
        let before = (costs_tokens.len() > 1).then(|| line.line.clone());
        let (mut entered, mut displaced) = (Vec::with_capacity(costs_tokens.len()), Vec::new());
        for cost_tokens in costs_tokens {
            *tickets += 1;
            let id = WaiterId(*tickets);
            let waiter = Waiter {
                tenant: Arc::clone(&claim.tenant),
                weight: claim.weight,
                priority: claim.priority,
                cost_tokens: *cost_tokens,
                arrived_us: now_us,
            };
            match line.line.push(id, waiter) {
                Ok(other) => displaced.extend(other),
                Err(full) => {
                    if let Some(before) = before {
                        line.line = before;
                    }
                    if line.line.is_empty() {
                        lines.remove(model);
                    }
                    self.metrics.waited.with_label_values(&["full"]).inc();
                    return Err(full);
                }
            }
            entered.push(id);
        }
        let ticket = |id| {
            let call = Arc::new(Notify::new());
            line.calls.insert(id, Arc::clone(&call));
            self.metrics.waiting.with_label_values(&[claim.priority.name()]).inc();
            let (lines, model) = (Arc::clone(self), Arc::clone(model));
            let priority = claim.priority;
            Ticket { lines, model, id, call, priority, since: Instant::now(), how: "cancelled" }
        };
        let tickets = entered.into_iter().map(ticket).collect();
        for id in displaced {
            if let Some(call) = line.calls.get(&id) {
                call.notify_one();
            }
            line.forget(id);
        }
        line.call_next(now_us);
        Ok(tickets)
    }

    /// So many wait for a model, at most.
    pub(super) fn requests_max(&self) -> usize {
        self.options.line.requests_max
    }

    /// How many wait for a model.
    pub(super) fn waiting(&self, model: &str) -> usize {
        self.lock().lines.get(model).map_or(0, |line| line.line.len())
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, ByModel> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a line, if it is there, and calls whose turn it is then.
    fn change(&self, model: &str, change: impl FnOnce(&mut OneLine, u64)) {
        let mut lines = self.lock();
        let now_us = self.now_us();
        if let Some(line) = lines.lines.get_mut(model) {
            change(line, now_us);
            line.call_next(now_us);
            if line.line.is_empty() {
                lines.lines.remove(model);
            }
        }
    }
}

/// A request's place in a line.
#[derive(Debug)]
pub(super) struct Ticket {
    lines: Arc<Lines>,
    model: Arc<str>,
    id: WaiterId,
    call: Arc<Notify>,
    priority: Priority,
    since: Instant,
    /// How it ends, for the metric.
    how: &'static str,
}

impl Ticket {
    /// How long its prefill may be predicted to wait at an instance, now.
    pub(super) fn ahead_us(&self) -> u64 {
        self.lines.ahead_us(self.since.elapsed())
    }

    /// Returns when it is its turn.
    ///
    /// # Errors
    /// [`Displaced`] when it will never be.
    pub(super) async fn turn(&mut self) -> Result<(), Displaced> {
        loop {
            {
                let lines = self.lines.lock();
                let line = lines.lines.get(&self.model);
                match line.filter(|line| line.line.contains(self.id)) {
                    None => {
                        self.how = "displaced";
                        return Err(Displaced);
                    }
                    Some(line) if line.called == Some(self.id) => return Ok(()),
                    Some(_) => {}
                }
            }
            self.call.notified().await;
        }
    }

    /// It cannot go now.
    pub(super) fn set_aside(&self, why: Aside) {
        self.lines.change(&self.model, |line, now_us| {
            line.line.set_aside(self.id, why, now_us);
            if line.called == Some(self.id) {
                line.called = None;
            }
        });
        self.lines.aside.notify_one();
    }

    /// It goes.
    pub(super) fn go(mut self) {
        self.how = "dispatched";
        self.lines.change(&self.model, |line, _| {
            line.line.take(self.id);
            line.forget(self.id);
        });
    }

    /// It is refused after all.
    pub(super) fn refused(mut self) {
        self.how = "refused";
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.lines.change(&self.model, |line, _| {
            line.line.remove(self.id);
            line.forget(self.id);
        });
        let metrics = &self.lines.metrics;
        metrics.waiting.with_label_values(&[self.priority.name()]).dec();
        metrics.waited.with_label_values(&[self.how]).inc();
        let waited = metrics.waited_seconds.with_label_values(&[self.priority.name()]);
        waited.observe(self.since.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use prometheus::Registry;

    use super::*;

    fn lines(requests_max: usize) -> Arc<Lines> {
        let line = LineOptions { requests_max, quantum_tokens: 10, ..LineOptions::default() };
        let options = WaitOptions { line, ahead: Duration::ZERO };
        Arc::new(Lines::new(options, Arc::new(Metrics::new(Registry::new()).expect("registers"))))
    }

    fn enter(lines: &Arc<Lines>, tenant: &str) -> Result<Ticket, LineFull> {
        let claim = Claim { tenant: tenant.into(), weight: 1, priority: Priority::Normal };
        lines.enter(&"m".into(), &claim, &[10]).map(|mut one| one.remove(0))
    }

    fn is_called(ticket: &mut Ticket) -> bool {
        ticket.turn().now_or_never().is_some_and(|turn| turn.is_ok())
    }

    #[test]
    fn one_is_called_at_a_time_and_the_next_one_when_it_goes_or_leaves() {
        let lines = lines(10);
        let mut first = enter(&lines, "a").expect("room");
        let mut second = enter(&lines, "a").expect("room");
        let mut third = enter(&lines, "b").expect("room");
        assert!(is_called(&mut first) && !is_called(&mut second) && !is_called(&mut third));
        first.go();
        assert!(!is_called(&mut second) && is_called(&mut third));
        drop(third);
        assert!(is_called(&mut second));
        drop(second);
        assert!(lines.lock().lines.is_empty(), "no request waits, and no state is left");
        let count = |how| lines.metrics.waited.with_label_values(&[how]).get();
        assert_eq!((count("dispatched"), count("cancelled")), (1, 2));
        assert_eq!(lines.metrics.waiting.with_label_values(&["normal"]).get(), 0);
    }

    #[test]
    fn who_has_waited_for_long_goes_to_instances_that_others_keep_busy() {
        let mut lines = lines(1);
        let options = &mut Arc::get_mut(&mut lines).expect("no request waits").options;
        options.ahead = Duration::from_secs(1);
        assert_eq!(lines.ahead_us(Duration::from_secs(8)), 1_000_000);
        assert_eq!(lines.ahead_us(Duration::from_secs(16)), 2_000_000);
    }

    #[tokio::test]
    async fn who_is_set_aside_is_called_again() {
        let lines = lines(10);
        let shutdown = CancellationToken::new();
        tokio::spawn(Arc::clone(&lines).run(shutdown.clone()));
        let _end = shutdown.drop_guard();
        let mut first = enter(&lines, "a").expect("room");
        let mut second = enter(&lines, "b").expect("room");
        assert!(is_called(&mut first));
        first.set_aside(Aside::Unfit);
        second.turn().await.expect("it passes");
        second.set_aside(Aside::Nobody);
        first.turn().await.expect("called again");
        first.go();
        second.turn().await.expect("called again");
    }

    #[tokio::test]
    async fn a_place_is_taken_from_the_tenant_with_most_and_from_nobody_in_vain() {
        let lines = lines(3);
        let mut called = enter(&lines, "many").expect("room");
        let mut others: Vec<Ticket> =
            (0..2).map(|_| enter(&lines, "many").expect("room")).collect();
        assert!(enter(&lines, "many").is_err());
        let claim = Claim { tenant: "few".into(), weight: 1, priority: Priority::High };
        assert!(lines.enter(&"m".into(), &claim, &[10; 3]).is_err(), "more than its share");
        assert!(is_called(&mut called));
        assert_eq!(lines.lock().lines["m"].line.len(), 3, "no request has lost its place");
        let _few = enter(&lines, "few").expect("a place");
        assert!(others.remove(1).turn().await.is_err(), "the last one has lost it");
        assert!(others[0].turn().now_or_never().is_none(), "it waits on");
        assert!(lines.enter(&"other".into(), &claim, &[10]).is_ok(), "a line of its own");
    }
}
