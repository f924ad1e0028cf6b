//! Which parts of what has arrived are computed together: those that attend the same rows in the same
//! way, so that each cached row is read once for all of them. A pure function, no I/O.

use std::collections::BTreeMap;

/// What parts must share to be computed together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attends {
    /// Names a list of slots: routes over the same slots have the same.
    pub blocks: u64,
    pub layer: u32,
    pub first_block: u32,
    pub cached_rows: u32,
    pub d_v: u32,
    pub scale_bits: u32,
}

/// A part of a message, by its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    pub message: usize,
    pub part: usize,
}

/// Groups in an order that depends on nothing but the parts; members in the order of arrival.
pub fn group(parts: impl IntoIterator<Item = (Attends, Member)>) -> Vec<(Attends, Vec<Member>)> {
    let mut groups: BTreeMap<Attends, Vec<Member>> = BTreeMap::new();
    for (attends, member) in parts {
        groups.entry(attends).or_default().push(member);
    }
    groups.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_over_the_same_rows_are_one_group_and_others_are_not() {
        let same =
            Attends { blocks: 1, layer: 2, first_block: 0, cached_rows: 64, d_v: 8, scale_bits: 5 };
        let others = [
            Attends { blocks: 2, ..same },
            Attends { layer: 3, ..same },
            Attends { first_block: 1, ..same },
            Attends { cached_rows: 63, ..same },
            Attends { d_v: 7, ..same },
            Attends { scale_bits: 6, ..same },
        ];
        let member = |message| Member { message, part: 0 };
        let mut parts = vec![(same, member(0))];
        parts.extend(others.iter().zip(1..).map(|(other, message)| (*other, member(message))));
        parts.push((same, member(7)));
        let groups = group(parts);
        assert_eq!(groups.len(), 7);
        let shared = groups.iter().find(|(attends, _)| *attends == same).expect("it is there");
        assert_eq!(shared.1, vec![member(0), member(7)]);
    }
}
