//! Who finds a region in its owner's table finds the length of that region, also while the entry gets another
//! one.

use loom::sync::Arc;
use loom::thread;

use crate::check;
use crate::entry::Entry;
use crate::sync::AtomicU64;

#[derive(Default)]
struct Words {
    key: AtomicU64,
    length_bytes: AtomicU64,
}

impl Words {
    fn entry(&self) -> Entry<'_> {
        Entry { key: &self.key, length_bytes: &self.length_bytes }
    }
}

#[test]
fn a_length_is_never_that_of_another_region() {
    check(3, || {
        let words = Arc::new(Words::default());
        words.entry().publish(5, 100);
        let changed = Arc::clone(&words);
        let owner = thread::spawn(move || {
            changed.entry().withdraw();
            changed.entry().publish(7, 300);
            changed.entry().withdraw();
            changed.entry().publish(8, 200);
        });
        for (key, length_bytes) in [(5, 100), (7, 300)] {
            let found = words.entry().length_of(key);
            assert!(found.is_none_or(|found| found == length_bytes), "{key} has {found:?}");
        }
        owner.join().expect("no panic");
        assert_eq!(words.entry().length_of(5), None);
        assert_eq!(words.entry().length_of(8), Some(200));
    });
}
