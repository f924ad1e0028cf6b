//! What a run draws. Whatever is not drawn here or by the simulated network and disks is not random.
//!
//! What is drawn for one thing follows from the seed, from what it is drawn for and from when, and from
//! nothing else ([`Random::of`]): leaving a request or a fault out does not change what is drawn for the
//! others.

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ 0x5851_f42d_4c95_7f2d)
    }

    /// For one occasion: `name` is the kind of choice, `ids` whom it concerns, and when.
    pub fn of(seed: u64, name: &str, ids: [u64; 3]) -> Self {
        let name = name.bytes().fold(seed, |state, byte| mix(state ^ u64::from(byte)));
        Random::new(ids.iter().fold(name, |state, id| mix(state.rotate_left(17) ^ id)))
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.draw() % (high - low + 1)
    }

    pub fn percent(&mut self, chance: u64) -> bool {
        self.draw() % 100 < chance
    }

    pub fn below(&mut self, count: usize) -> usize {
        (self.draw() % count as u64) as usize
    }
}

/// Spreads a number over all bits.
pub fn mix(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
