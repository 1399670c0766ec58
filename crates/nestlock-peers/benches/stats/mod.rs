//! Statistics of samples, for the benches.
#![allow(clippy::cast_precision_loss)]

/// Sorts the samples. Returns the one at `share` (0 to 1) of them, or NaN if there are none.
pub(crate) fn percentile(samples: &mut [f64], share: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    #[allow(clippy::cast_sign_loss)] // a share
    let at = (samples.len() as f64 * share) as usize;
    samples
        .get(at.min(samples.len().saturating_sub(1)))
        .copied()
        .unwrap_or(f64::NAN)
}

/// Returns the median, or NaN if there are no samples.
pub(crate) fn median(samples: impl IntoIterator<Item = f64>) -> f64 {
    percentile(&mut samples.into_iter().collect::<Vec<_>>(), 0.5)
}
