//! Which CTA takes which query rows and which cached rows: no device is needed to say it.
//!
//! Query rows go in tiles of [`QUERY_ROWS`], cached rows in tiles of the kernel's. One query alone
//! has too few tiles for a GPU, so a job's rows are split over CTAs, each leaving a part
//! (flash-decoding). Splitting costs: each part is written and read again, and each CTA has a
//! beginning and an end in which it computes nothing. [`Plan::new`] takes as many tiles to a CTA as
//! makes the estimate least.

use super::variant::QUERY_ROWS;

/// What a job's size is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobShape {
    pub query_rows: u32,
    /// Rows of its list, or of its selection.
    pub rows: u32,
}

/// What one CTA does. Laid out as `Work` of `layout.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Work {
    pub job: u32,
    pub query_first: u32,
    pub row_first: u32,
    pub row_end: u32,
    /// Which of the job's splits.
    pub split: u32,
}

/// How the parts of a job lie among those of all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobParts {
    /// 1: no parts, the result is written at once.
    pub splits: u32,
    /// Split `s` of query row `i` is row `first + s × query_rows + i` of the parts.
    pub first: u64,
}

/// A launch of `kvasir_partial` and, where there are parts, one of a merge.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub works: Vec<Work>,
    pub jobs: Vec<JobParts>,
    /// Rows of all parts: `d_v` values of `o`, one of `m` and one of `l` each.
    pub part_rows: u64,
    pub query_rows_max: u32,
}

/// What a plan is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Cached rows that a CTA takes at a time.
    pub tile_rows: u32,
    /// CTAs that run at a time: one on each multiprocessor.
    pub multiprocessors: u32,
}

/// Fitted to what `tests/gpu/run` measured on an H200 with each number of tiles: 64 query rows against
/// 64 cached rows, where all multiprocessors do the same. One that is alone takes as long.
const TILE_NS: u64 = 2_700;
/// Beginning and end of a CTA: it is launched, queries and the first tile come, and outputs go.
const CTA_NS: u64 = 4_500;
/// What the merge adds at least: it is launched while parts are computed.
const MERGE_NS: u64 = 1_000;
/// For 1,024 rows of parts (2 KiB each), which are written to the second-level cache and read again.
const PART_ROWS_1024_NS: u64 = 1_000;

impl Plan {
    /// Plans jobs in their order.
    ///
    /// # Panics
    /// When the machine has no multiprocessors or its tiles no rows.
    pub fn new(shapes: &[JobShape], machine: Machine) -> Plan {
        assert!(machine.tile_rows > 0 && machine.multiprocessors > 0, "a machine that computes");
        let tiles_max = shapes.iter().map(|shape| row_tiles(shape, machine)).max().unwrap_or(1);
        let estimate_ns = |&tiles: &u32| {
            let plan_of = |shape: &JobShape| {
                let splits = u64::from(row_tiles(shape, machine).div_ceil(tiles));
                let parts = if splits > 1 { splits * u64::from(shape.query_rows) } else { 0 };
                (u64::from(query_tiles(shape)) * splits, parts)
            };
            let (ctas, parts) =
                shapes.iter().map(plan_of).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
            let rounds = ctas.div_ceil(u64::from(machine.multiprocessors));
            let tile_ns = TILE_NS * u64::from(machine.tile_rows) / 64;
            let merge_ns = if parts > 0 { MERGE_NS + parts * PART_ROWS_1024_NS / 1024 } else { 0 };
            rounds * (CTA_NS + u64::from(tiles) * tile_ns) + merge_ns
        };
        let tiles = (1..=tiles_max).min_by_key(estimate_ns).unwrap_or(1);
        Plan::with_tiles(shapes, machine, tiles)
    }

    /// Plans with at most so many tiles of rows for each CTA.
    pub fn with_tiles(shapes: &[JobShape], machine: Machine, tiles: u32) -> Plan {
        let mut plan =
            Plan { works: Vec::new(), jobs: Vec::new(), part_rows: 0, query_rows_max: 0 };
        for (job, shape) in shapes.iter().enumerate() {
            let row_tiles = row_tiles(shape, machine);
            let splits = row_tiles.div_ceil(tiles.max(1));
            // The first `longer` splits have one tile more than the others.
            let (each, longer) = (row_tiles / splits, row_tiles % splits);
            for split in 0..splits {
                let begin = split * each + split.min(longer);
                let end = begin + each + u32::from(split < longer);
                for tile in 0..query_tiles(shape) {
                    plan.works.push(Work {
                        job: job as u32,
                        query_first: tile * QUERY_ROWS as u32,
                        row_first: begin * machine.tile_rows,
                        row_end: end.saturating_mul(machine.tile_rows).min(shape.rows),
                        split,
                    });
                }
            }
            plan.jobs.push(JobParts { splits, first: plan.part_rows });
            if splits > 1 {
                plan.part_rows += u64::from(splits) * u64::from(shape.query_rows);
            }
            plan.query_rows_max = plan.query_rows_max.max(shape.query_rows);
        }
        plan
    }

    /// The most parts that are merged to one; 1 where there is nothing to merge.
    pub fn splits_max(&self) -> u32 {
        let splits = self.jobs.iter().map(|job| job.splits).max().filter(|_| self.part_rows > 0);
        splits.unwrap_or(1)
    }
}

fn query_tiles(shape: &JobShape) -> u32 {
    shape.query_rows.div_ceil(QUERY_ROWS as u32)
}

/// At least one: a list without rows has a partial too.
fn row_tiles(shape: &JobShape, machine: Machine) -> u32 {
    shape.rows.div_ceil(machine.tile_rows).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Machine = Machine { tile_rows: 64, multiprocessors: 132 };

    /// Each pair of a query row and a cached row is in one work, and each part is written once.
    fn check(shapes: &[JobShape], plan: &Plan, machine: Machine) {
        let mut parts = vec![0u32; plan.part_rows as usize];
        for (job, (shape, of)) in shapes.iter().zip(&plan.jobs).enumerate() {
            let (queries, rows) = (shape.query_rows as usize, shape.rows as usize);
            let mut seen = vec![0u32; queries * rows];
            for work in plan.works.iter().filter(|work| work.job as usize == job) {
                assert_eq!(work.query_first % QUERY_ROWS as u32, 0);
                assert_eq!(work.row_first % machine.tile_rows, 0);
                assert!(work.split < of.splits && work.row_end <= shape.rows);
                assert!(work.row_first < work.row_end || rows == 0);
                let first = work.query_first as usize;
                for query in first..queries.min(first + QUERY_ROWS) {
                    for row in work.row_first as usize..work.row_end as usize {
                        seen[query * rows + row] += 1;
                    }
                    if of.splits > 1 {
                        let part = of.first as usize + work.split as usize * queries + query;
                        parts[part] += 1;
                    }
                }
            }
            assert!(seen.iter().all(|&times| times == 1), "{shape:?}");
        }
        assert!(parts.iter().all(|&times| times == 1), "{shapes:?}");
    }

    #[test]
    fn every_pair_is_computed_once_and_every_part_written_once() {
        let sizes = [0u32, 1, 63, 64, 65, 200, 700];
        for machine in [H200, Machine { tile_rows: 32, multiprocessors: 7 }] {
            for query_rows in [0u32, 1, 16, 64, 130] {
                for rows in sizes {
                    let shapes =
                        [JobShape { query_rows, rows }, JobShape { query_rows: 3, rows: 100 }];
                    check(&shapes, &Plan::new(&shapes, machine), machine);
                    for tiles in [1, 2, 3, 100] {
                        check(&shapes, &Plan::with_tiles(&shapes, machine, tiles), machine);
                    }
                }
            }
        }
    }

    #[test]
    fn one_query_is_split_over_the_gpu_and_many_are_not() {
        let one = Plan::new(&[JobShape { query_rows: 128, rows: 2048 }], H200);
        assert!(one.works.len() > 32 && one.works.len() <= 132, "{}", one.works.len());
        let many = Plan::new(&[JobShape { query_rows: 128 * 256, rows: 2048 }], H200);
        assert_eq!(many.splits_max(), 1);
        // Who has no query rows has no parts, however many splits there would be.
        let none = JobShape { query_rows: 0, rows: 6400 };
        let plan = Plan::with_tiles(&[none, JobShape { query_rows: 1, rows: 64 }], H200, 1);
        assert_eq!((plan.part_rows, plan.splits_max()), (0, 1));
    }

    #[test]
    fn a_selection_costs_what_it_selects() {
        let of = |rows| Plan::new(&[JobShape { query_rows: 128, rows }], H200).works.len();
        assert_eq!(of(2048), of(2048 - 63));
    }
}
