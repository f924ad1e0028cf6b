//! The reference: two passes over the rows in f64, as the definition says. Slow and plain; other
//! kernels are judged by it.

use crate::pages::PageList;
use crate::partial::{PartialMut, Query};

pub(crate) fn attend(query: &Query<'_>, pages: &PageList<'_>, out: PartialMut<'_>) {
    let mut k = vec![0f32; query.d_qk];
    let mut logits: Vec<f64> = Vec::with_capacity(pages.rows());
    let mut sum = vec![0f64; query.d_v];
    for row in 0..query.rows() {
        let visible = query.visible.of(row, pages.rows());
        logits.clear();
        for t in 0..visible {
            pages.read_row(t, &mut k);
            let dot: f64 =
                query.row(row).iter().zip(&k).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
            logits.push(dot * f64::from(query.scale));
        }
        let m = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut l = 0f64;
        sum.fill(0.0);
        for (t, logit) in logits.iter().enumerate() {
            pages.read_row(t, &mut k);
            let p = (logit - m).exp();
            l += p;
            sum.iter_mut().zip(&k).for_each(|(sum, &v)| *sum += p * f64::from(v));
        }
        let o = &mut out.o[row * query.d_v..][..query.d_v];
        for (o, sum) in o.iter_mut().zip(&sum) {
            *o = if l > 0.0 { (sum / l) as f32 } else { 0.0 };
        }
        (out.m[row], out.l[row]) = (m as f32, l as f32);
    }
}
