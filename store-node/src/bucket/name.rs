//! Names of objects, which say all that is known of a block but its bytes: so a list of names is enough to find
//! them, and to know which ones nobody wants any more.
//!
//! `PREFIX/v1/LAYOUT/NAMESPACE/KEY/PARENT-UNTIL-TENANT`: numbers in hexadecimal, of fixed length but for times
//! (milliseconds since the Unix epoch); `root` for no parent. Of the last block of a context `-SINCE-UNTIL` follows,
//! the times of that context. A block whose times change has two names for a moment.

use kvasir_blocks::SsdBlock;
use kvasir_proto::{BlockKey, Class, Mark, Namespace, Tenant};
use object_store::path::Path;

const VERSION: &str = "v1";
const ROOT: &str = "root";

/// The names under one prefix.
#[derive(Debug, Clone)]
pub(crate) struct Names {
    /// All names begin with it.
    root: Path,
}

impl Names {
    pub(crate) fn new(prefix: &str) -> Self {
        Names { root: Path::from(format!("{prefix}/{VERSION}")) }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Where nothing is: to find out whether anybody answers.
    pub(crate) fn nothing(&self) -> Path {
        self.root.clone().join("nothing")
    }

    /// The name of a block's object; `None` of one that is kept for nobody.
    pub(crate) fn of(&self, block: &SsdBlock) -> Option<Path> {
        let Class::Context { tenant, expires_unix_ms } = block.class else { return None };
        let parent = block.parent.map_or_else(|| ROOT.to_owned(), |parent| hex(&parent.0));
        let context =
            block.mark.and_then(|mark| Some((mark.created_unix_ms?, mark.expires_unix_ms)));
        let context = context.map(|(since, until)| format!("-{since:x}-{until:x}"));
        let context = context.unwrap_or_default();
        let last = format!("{parent}-{expires_unix_ms:x}-{:016x}{context}", tenant.0);
        Some(self.under(block.layout, block.namespace, block.key).join(last))
    }

    /// All names of one block begin with it.
    pub(crate) fn under(&self, layout: u64, namespace: Namespace, key: BlockKey) -> Path {
        let parts = [format!("{layout:016x}"), hex(&namespace.0), hex(&key.0)];
        parts.into_iter().fold(self.root.clone(), Path::join)
    }

    /// What a name says; `None` when it is none of this program's.
    pub(crate) fn parse(&self, name: &Path, bytes: u64) -> Option<SsdBlock> {
        let mut parts = name.prefix_match(&self.root)?;
        let mut next = || parts.next();
        let (layout, namespace, key, last) = (next()?, next()?, next()?, next()?);
        if next().is_some() {
            return None;
        }
        let mut of_last = last.as_ref().split('-');
        let (parent, until, tenant) = (of_last.next()?, of_last.next()?, of_last.next()?);
        let context = of_last.next().map(|since| Some((since, of_last.next()?)));
        if of_last.next().is_some() {
            return None;
        }
        let parent = match parent {
            ROOT => None,
            parent => Some(BlockKey(key_of(parent)?)),
        };
        let (tenant, time) = (Tenant(number(tenant)?), |text| u64::from_str_radix(text, 16).ok());
        let class = Class::Context { tenant, expires_unix_ms: time(until)? };
        let mark = match context {
            None => None,
            Some(times) => {
                let (since, until) = times?;
                let created_unix_ms = Some(time(since)?);
                Some(Mark { tenant, expires_unix_ms: time(until)?, created_unix_ms, copies: 1 })
            }
        };
        let block = SsdBlock {
            key: BlockKey(key_of(key.as_ref())?),
            namespace: Namespace(key_of(namespace.as_ref())?),
            parent,
            class,
            mark,
            layout: number(layout.as_ref())?,
            bytes,
        };
        // One block has one name.
        (self.of(&block).as_ref() == Some(name)).then_some(block)
    }
}

fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}

fn key_of(text: &str) -> Option<[u8; 16]> {
    (text.len() == 32).then_some(())?;
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}

fn number(text: &str) -> Option<u64> {
    (text.len() == 16).then_some(())?;
    u64::from_str_radix(text, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(parent: Option<u8>) -> SsdBlock {
        SsdBlock {
            key: BlockKey([0xab; 16]),
            namespace: Namespace([7; 16]),
            parent: parent.map(|byte| BlockKey([byte; 16])),
            class: Class::Context { tenant: Tenant(5), expires_unix_ms: 1_700_000_000_123 },
            mark: None,
            layout: 9,
            bytes: 77,
        }
    }

    /// The last block of a context.
    fn last(parent: Option<u8>) -> SsdBlock {
        let expires_unix_ms = 0x018b_cfe5_6800;
        let mark = Mark { tenant: Tenant(5), expires_unix_ms, created_unix_ms: Some(3), copies: 1 };
        SsdBlock { mark: Some(mark), ..block(parent) }
    }

    #[test]
    fn a_name_says_what_a_block_is() {
        for (prefix, root) in [("", "v1"), ("a/b", "a/b/v1")] {
            let names = Names::new(prefix);
            assert_eq!(names.root().as_ref(), root);
            for block in [block(None), block(Some(0)), block(Some(0xff)), last(None), last(Some(1))]
            {
                let name = names.of(&block).expect("a name");
                assert_eq!(names.parse(&name, 77), Some(block), "{name}");
            }
        }
        let name = Names::new("p").of(&block(None)).expect("a name").to_string();
        let key = "ab".repeat(16);
        let namespace = "07".repeat(16);
        assert_eq!(
            name,
            format!("p/v1/0000000000000009/{namespace}/{key}/root-18bcfe5687b-0000000000000005")
        );
        let end = Names::new("p").of(&last(None)).expect("a name").to_string();
        assert_eq!(
            end,
            format!("{name}-3-18bcfe56800"),
            "the name of a block without an end is unchanged"
        );
        assert_eq!(Names::new("").of(&SsdBlock { class: Class::Normal, ..block(None) }), None);
    }

    #[test]
    fn other_names_say_nothing() {
        let names = Names::new("p");
        let good = names.of(&block(Some(1))).expect("a name").to_string();
        let wrong = [
            "p/v1".to_owned(),
            "p/v1/nothing".to_owned(),
            "other".to_owned(),
            good.replace("p/v1", "p/v2"),
            good.replace("p/v1", "q/v1"),
            good.replace("ab", "AB"),
            good.replace("ab", "zz"),
            format!("{good}/more"),
            format!("{good}-more"),
            format!("{good}-3"),
            format!("{good}-3-"),
            format!("{good}-03-9"),
            format!("{good}-3-9-9"),
            good[..good.len() - 1].to_owned(),
            good.replace("-18bcfe5687b-", "-0018bcfe5687b-"),
            good.replace("-18bcfe5687b-", "-+8bcfe5687b-"),
            good.replace("-18bcfe5687b-", "--"),
        ];
        for name in wrong {
            assert_eq!(names.parse(&Path::from(name.as_str()), 77), None, "{name}");
        }
        assert!(names.parse(&Path::from(good), 77).is_some());
    }
}
