//! Point-to-point transfer engine: regions, one-sided writes, immediate counters
