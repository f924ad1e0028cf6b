//! Room in a completion queue: what was given back has nothing in the queue any more.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::check;
use crate::room::Room;

/// A completion queue for one completion, as a driver locks it.
struct Queue {
    room: Room,
    waiting: Mutex<u32>,
}

impl Queue {
    /// With a queue pair that was destroyed, and has left nothing.
    fn with_one_gone() -> Queue {
        let queue = Queue { room: Room::new(1), waiting: Mutex::new(0) };
        queue.room.reserve(1).expect("it is empty");
        queue.room.leave_behind(1);
        queue
    }

    fn poll(&self) {
        let left = self.room.left();
        *self.waiting.lock().expect("no panic") = 0;
        self.room.seen_empty(left);
    }

    /// A queue pair that completes something and is destroyed, if there is room for it.
    fn one_more(&self) {
        if self.room.reserve(1).is_ok() {
            let mut waiting = self.waiting.lock().expect("no panic");
            assert_eq!(*waiting, 0, "a queue for one has two");
            *waiting += 1;
            drop(waiting);
            self.room.leave_behind(1);
        }
    }
}

#[test]
fn room_is_given_back_once_and_only_when_nothing_is_left() {
    check(3, || {
        let queue = Arc::new(Queue::with_one_gone());
        let polled = Arc::clone(&queue);
        let poller = thread::spawn(move || polled.poll());
        queue.poll();
        queue.one_more();
        queue.one_more();
        poller.join().expect("no panic");
        // Whoever saw it empty last has settled everything, or one queue pair's completion is there yet.
        queue.poll();
        queue.poll();
        assert_eq!(queue.room.free(), 1, "nothing is lost, nothing is free twice");
    });
}

#[test]
fn of_two_that_take_the_last_room_one_gets_it() {
    check(3, || {
        let room = Arc::new(Room::new(3));
        let other = Arc::clone(&room);
        let taken = thread::spawn(move || other.reserve(2).is_ok());
        let here = room.reserve(2);
        let there = taken.join().expect("no panic");
        assert!(here.is_ok() != there, "{here:?}");
        assert_eq!(room.free(), 1);
        room.cancel(2);
        assert_eq!(room.free(), 3);
    });
}
