//! I4: never is a block served outside its namespace.

use std::rc::Rc;

use super::Checker;
use crate::content::Truth;
use crate::seen::Seen;

#[derive(Debug)]
pub(super) struct Namespaces {
    truth: Rc<Truth>,
}

impl Namespaces {
    pub(super) fn new(truth: Rc<Truth>) -> Self {
        Namespaces { truth }
    }
}

impl Checker for Namespaces {
    fn name(&self) -> &'static str {
        "I4 namespaces"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        let (at, share, namespace, keys) = match seen {
            Seen::Held { at, share, namespace, keys } => (at, share.to_string(), namespace, keys),
            Seen::Found { at, namespace, keys } => (at, "a client".to_owned(), namespace, keys),
            _ => return Ok(()),
        };
        let foreign = keys.iter().find(|key| {
            self.truth.blocks.get(*key).is_some_and(|block| block.namespace != *namespace)
        });
        match foreign {
            Some(key) => Err(format!(
                "{at:?} serves {key:?} to {share}, which names another namespace than the block's"
            )),
            None => Ok(()),
        }
    }
}
