//! Room for connections: how many there may be, and whether they are scarce.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use prometheus::IntGauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// See the module.
#[derive(Debug)]
pub(super) struct Places {
    max: usize,
    free: Arc<Semaphore>,
    taken: AtomicUsize,
    /// The same for the metrics.
    gauge: IntGauge,
    /// More than half are taken.
    scarce: watch::Sender<bool>,
}

impl Places {
    pub(super) fn new(max: usize, gauge: IntGauge) -> Places {
        let (free, scarce) = (Arc::new(Semaphore::new(max)), watch::Sender::new(false));
        Places { max, free, taken: AtomicUsize::new(0), gauge, scarce }
    }

    /// Room for one more, waited for while there is none.
    pub(super) async fn room(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.free).acquire_owned().await.ok()
    }

    fn changed(&self) {
        // One after the other in there: the last sees what all have done.
        self.scarce.send_if_modified(|scarce| {
            let now = self.taken.load(Ordering::SeqCst) > self.max / 2;
            std::mem::replace(scarce, now) != now
        });
    }
}

/// One connection's place, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    _room: OwnedSemaphorePermit,
}

impl Place {
    pub(super) fn take(places: &Arc<Places>, room: OwnedSemaphorePermit) -> Place {
        places.taken.fetch_add(1, Ordering::SeqCst);
        places.gauge.inc();
        places.changed();
        Place { places: Arc::clone(places), _room: room }
    }

    /// True while more than half of all places are taken.
    pub(super) fn scarce(&self) -> watch::Receiver<bool> {
        self.places.scarce.subscribe()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken.fetch_sub(1, Ordering::SeqCst);
        self.places.gauge.dec();
        self.places.changed();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn take(places: &Arc<Places>) -> Place {
        Place::take(places, places.room().await.expect("it is open"))
    }

    #[tokio::test]
    async fn places_are_scarce_while_more_than_half_are_taken_whatever_ends_a_connection() {
        let gauge = IntGauge::new("open", "for a test").expect("a gauge");
        let places = Arc::new(Places::new(4, gauge.clone()));
        let (first, second) = (take(&places).await, take(&places).await);
        let scarce = first.scarce();
        assert!(!*scarce.borrow());
        let broken = tokio::spawn({
            let third = take(&places).await;
            assert_eq!((gauge.get(), *scarce.borrow()), (3, true));
            async move {
                let _third = third;
                panic!("as a connection may");
            }
        });
        assert!(broken.await.is_err());
        assert_eq!((gauge.get(), *scarce.borrow()), (2, false));
        drop((first, second));
        assert_eq!((gauge.get(), places.free.available_permits()), (0, 4));
    }
}
