//! The log on a simulated disk: crashes at every point, rot, full and failing disks, cleaning.

mod cleaning;
mod crashes;
mod faults;
mod marks;
mod objects;
mod placed;
mod support;
