//! Wakes the worker: one descriptor for the queues of all pipes, for the bell of who ends registrations, and
//! for naps, where nothing else tells that something has happened.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

/// Of a worker whose provider has no descriptor, or that waits for something without one. They double from
/// the first to the last while nothing happens: idle engines are to use under 1 % of a core.
const NAP_FIRST: Duration = Duration::from_micros(50);
const NAP_LAST: Duration = Duration::from_millis(10);
/// While something of ours is under way.
const NAP_WAITING: Duration = Duration::from_micros(200);

#[derive(Debug)]
pub(super) struct Alarm {
    epoll: OwnedFd,
    timer: OwnedFd,
    nap: Duration,
    /// Never readable: no provider reports anything on its own.
    silent: OwnedFd,
}

impl Alarm {
    pub(super) fn new(bell: BorrowedFd<'_>) -> rustix::io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let alarm = Alarm {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            timer: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            nap: NAP_FIRST,
            silent: eventfd(0, EventfdFlags::CLOEXEC)?,
        };
        alarm.listen(bell)?;
        alarm.listen(alarm.timer.as_fd())?;
        Ok(alarm)
    }

    /// From now on it wakes. It need not be taken out before it is closed.
    pub(super) fn listen(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(0), EventFlags::IN)
    }

    /// One that is closed later, or by nobody.
    pub(super) fn ignore(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(super) fn silent_fd(&self) -> BorrowedFd<'_> {
        self.silent.as_fd()
    }

    /// Something has happened: the next nap is short.
    pub(super) fn busy(&mut self) {
        self.nap = NAP_FIRST;
    }

    /// Something is waited for: the next nap is not long.
    pub(super) fn hurry(&mut self) {
        self.nap = self.nap.min(NAP_WAITING);
    }

    /// Wakes after a nap at the latest, or does not.
    pub(super) fn set_nap(&mut self, is_wanted: bool) -> rustix::io::Result<()> {
        let nap = if is_wanted { self.nap } else { Duration::ZERO };
        if is_wanted {
            self.nap = (self.nap * 2).min(NAP_LAST);
        }
        let none = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = Timespec { tv_nsec: nap.subsec_nanos().into(), ..none };
        let once = Itimerspec { it_interval: none, it_value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once).map(|_| ())
    }

    pub(super) fn clear(&self) {
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_readable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
        crate::doorbell::sleep(&[fd], timeout) != 0
    }

    #[test]
    fn naps_wake_grow_and_are_short_again_after_work() {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a bell");
        let mut alarm = Alarm::new(bell.as_fd()).expect("descriptors");
        assert!(!is_readable(alarm.fd(), Duration::ZERO));
        for _ in 0..20 {
            alarm.set_nap(true).expect("set");
            assert!(is_readable(alarm.fd(), Duration::from_secs(30)));
            alarm.clear();
        }
        assert_eq!(alarm.nap, NAP_LAST);
        alarm.busy();
        assert_eq!(alarm.nap, NAP_FIRST);
        alarm.set_nap(true).expect("set");
        alarm.set_nap(false).expect("set");
        alarm.clear();
        assert!(!is_readable(alarm.fd(), Duration::from_millis(1)), "it was called off");
        rustix::io::write(&bell, &1_u64.to_ne_bytes()).expect("it rings");
        assert!(is_readable(alarm.fd(), Duration::ZERO));
    }
}
