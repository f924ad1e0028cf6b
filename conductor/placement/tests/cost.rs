//! The cost models against machines that they do not know.

use kvasir_placement::{
    DecodeModel, DecodeProfile, InstanceProfile, LinkModel, LinkProfile, PrefillModel,
    PrefillProfile,
};

/// Lengths as requests have them: computed and reused tokens.
fn lengths() -> impl Iterator<Item = (u64, u64)> {
    let computed = [50, 400, 1_000, 3_000, 9_000, 200, 6_000];
    let reused = [0, 0, 2_000, 500, 0, 8_000, 0, 1_500, 300];
    (0..60).map(move |i| (computed[i % 7], reused[i % 9]))
}

fn true_us(machine: [f64; 3], n: u64, r: u64) -> u64 {
    let (n, r) = (n as f64, r as f64);
    (machine[0] + machine[1] * n + machine[2] * n * (2.0 * r + n)) as u64
}

fn check_learns(machine: [f64; 3], within: f64) {
    let mut model = PrefillModel::new(PrefillProfile::default());
    for (n, r) in lengths() {
        model.observe(n, r, true_us(machine, n, r));
    }
    for (n, r) in [(100, 0), (2_000, 0), (2_000, 4_000), (8_000, 1_000), (20_000, 0)] {
        let (predicted, real) = (model.predict_us(n, r) as f64, true_us(machine, n, r) as f64);
        let off = (predicted / real - 1.0).abs();
        assert!(off < within, "{machine:?}: ({n}, {r}) takes {real}, predicted {predicted}");
    }
}

#[test]
fn a_machine_of_any_speed_is_learned_from_sixty_prefills() {
    check_learns([1_000.0, 100.0, 0.005], 0.01);
    check_learns([20_000.0, 5.0, 0.0003], 0.10);
    check_learns([3_000.0, 2_000.0, 0.4], 0.10);
    check_learns([500.0, 900.0, 0.0], 0.10);
    check_learns([10.0, 1.0, 0.0001], 0.25);
}

#[test]
fn prefills_of_one_length_are_learned_and_reuse_still_pays() {
    let mut model = PrefillModel::new(PrefillProfile::default());
    for _ in 0..20 {
        model.observe(512, 0, 5_120);
    }
    let predicted = model.predict_us(512, 0);
    assert!((4_900..5_400).contains(&predicted), "{predicted}");
    assert!(model.predict_us(256, 256) < predicted);
    assert!(model.predict_us(1_024, 0) > predicted);
}

#[test]
fn an_outlier_hardly_moves_what_is_known_but_a_lasting_change_does() {
    let mut model = PrefillModel::new(PrefillProfile::default());
    let machine = [1_000.0, 50.0, 0.001];
    for (n, r) in lengths() {
        model.observe(n, r, true_us(machine, n, r));
    }
    let before = model.predict_us(1_000, 0);
    model.observe(1_000, 0, before * 1_000);
    model.observe(1_000, 0, 1);
    let after = model.predict_us(1_000, 0);
    assert!(after.abs_diff(before) * 5 < before, "{before} became {after}");
    let slower = machine.map(|part| part * 3.0);
    for _ in 0..10 {
        for (n, r) in lengths() {
            model.observe(n, r, true_us(slower, n, r));
        }
    }
    let (predicted, real) = (model.predict_us(1_000, 0), true_us(slower, 1_000, 0));
    assert!(predicted.abs_diff(real) * 5 < real, "{real}, predicted {predicted}");
}

/// Short prompts say little of long ones, so that a single long one would say all.
#[test]
fn one_prefill_on_a_stopped_machine_does_not_price_those_that_are_longer() {
    let mut model = PrefillModel::new(PrefillProfile::default());
    let machine = [2_000.0, 90.0, 0.01];
    for n in (0..100).map(|i| 10 + i * 7 % 30) {
        model.observe(n, 0, true_us(machine, n, 0));
    }
    let before = model.predict_us(2_000, 0);
    model.observe(400, 0, 5_000_000);
    model.observe(1_000, 0, 90_000_000);
    assert_eq!(model.predict_us(2_000, 0), before);
}

/// What is far from all that was known is learned all the same, if it comes again.
#[test]
fn lengths_that_were_new_and_a_machine_that_became_slower_are_believed() {
    let mut model = PrefillModel::new(PrefillProfile::default());
    let machine = [2_000.0, 90.0, 1.0];
    for n in (0..100).map(|i| 1 + i % 3) {
        model.observe(n, 0, true_us(machine, n, 0));
    }
    for n in [1, 3_000, 2, 3_500, 3, 4_000, 1, 3_700] {
        model.observe(n, 0, true_us(machine, n, 0));
    }
    let (predicted, real) = (model.predict_us(3_600, 0), true_us(machine, 3_600, 0));
    assert!(predicted.abs_diff(real) * 5 < real, "{real}, predicted {predicted}");
}

#[test]
fn whatever_is_fed_estimates_stay_finite_and_reuse_never_costs() {
    let mut model = PrefillModel::new(PrefillProfile::default());
    let wild = [0, 1, 3, 1_000, u64::MAX, 17, u64::from(u32::MAX)];
    for i in 0..300 {
        let at = |step: usize| wild[(i * step + i / 7) % wild.len()];
        model.observe(at(1), at(2), at(3));
        let profile = model.profile();
        for part in [profile.base_us, profile.token_us, profile.pair_us] {
            assert!(part.is_finite() && part >= 0.0, "{profile:?}");
        }
        let prompt = 5_000;
        let costs: Vec<u64> =
            (0..=4_900).step_by(700).map(|r| model.predict_us(prompt - r, r)).collect();
        assert!(costs.is_sorted_by(|a, b| a >= b), "{costs:?}");
        assert!(model.predict_us(u64::MAX, u64::MAX) <= 3_600_000_000);
    }
}

#[test]
fn bandwidth_follows_what_was_measured() {
    let mut link = LinkModel::new(LinkProfile { base_us: 1_000.0, bytes_per_us: 1_000.0 });
    assert_eq!(link.predict_us(10_000_000), 11_000);
    assert_eq!(link.occupied_us(10_000_000), 10_000, "what comes behind it waits for its bytes");
    for _ in 0..50 {
        link.observe(10_000_000, 1_000 + 2_500, true);
    }
    assert!((link.bytes_per_us() - 4_000.0).abs() < 100.0, "{}", link.bytes_per_us());
    for _ in 0..50 {
        link.observe(10_000_000, 101_000, false);
    }
    let known = link.bytes_per_us();
    assert!((known - 4_000.0).abs() < 100.0, "among others it may have waited: {known}");
    link.observe(10, 1_000_000, true);
    link.observe(10_000_000, 0, true);
    assert!((link.bytes_per_us() - 4_000.0).abs() < 100.0, "small ones say nothing");
    let mut beside = link.clone();
    for _ in 0..50 {
        beside.observe(10_000_000, 1_000 + 1_250, false);
    }
    let known = beside.bytes_per_us();
    assert!(known > 7_500.0, "what is faster than was known shows that it can be: {known}");
    link.observe(u64::MAX, 1, true);
    assert!(link.bytes_per_us() < 8_000.0, "one wild value: {}", link.bytes_per_us());
    link.observe(u64::MAX, 1, true);
    for _ in 0..1_000 {
        link.observe(100_000, u64::MAX, true);
    }
    assert!(link.bytes_per_us() > 0.05, "{}", link.bytes_per_us());
    assert!(link.predict_us(u64::MAX) <= 3_600_000_000);
}

#[test]
fn decode_steps_and_answers_follow_what_was_measured() {
    let profile = DecodeProfile {
        base_us: 1_000.0,
        sequence_us: 100.0,
        token_us: 0.0,
        answer_us: 1_000_000.0,
        generated_tokens: 256.0,
    };
    let mut model = DecodeModel::new(profile);
    assert_eq!((model.predict_step_us(1, 0.0), model.predict_step_us(10, 0.0)), (1_100, 2_000));
    for _ in 0..60 {
        model.observe_step(10, 0.0, 6_000);
        model.observe_answer(30_000_000, 1_000);
    }
    assert!((5_900..6_100).contains(&model.predict_step_us(10, 0.0)));
    assert!(model.predict_step_us(20, 0.0) > model.predict_step_us(10, 0.0));
    assert!((29_000_000..30_100_000).contains(&model.answer_us()));
    model.observe_step(1, 0.0, 0);
    model.observe_step(1, 0.0, u64::MAX);
    assert!((990..=1_000).contains(&model.generated_tokens()), "{}", model.generated_tokens());
    model.observe_answer(u64::MAX, u32::MAX);
    assert!(model.predict_step_us(1, 0.0) < 200 * 1_100, "{}", model.predict_step_us(1, 0.0));
    assert!(model.predict_step_us(u32::MAX, 0.0) <= 3_600_000_000);
}

#[test]
fn a_step_takes_longer_over_a_longer_context() {
    let profile = DecodeProfile { token_us: 0.5, ..DecodeProfile::default() };
    let mut model = DecodeModel::new(profile);
    let [short_us, long_us] = [1_000.0, 100_000.0].map(|tokens| model.predict_step_us(8, tokens));
    assert_eq!(long_us - short_us, 49_500);
    // A machine of twice that speed.
    for _ in 0..60 {
        model.observe_step(8, 1_000.0, short_us / 2);
        model.observe_step(8, 100_000.0, long_us / 2);
    }
    let learned_us = model.predict_step_us(8, 50_000.0);
    let real_us = (2_000.0 + 8.0 * 500.0 + 0.5 * 50_000.0) / 2.0;
    assert!((learned_us as f64 / real_us - 1.0).abs() < 0.02, "{learned_us} for {real_us}");
}

#[test]
fn the_published_profiles_of_instances_are_what_models_start_from() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/instances");
    let mut profiles = 0;
    for entry in std::fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("a file").path();
        let text = std::fs::read_to_string(&path).expect("it is read");
        let profile: InstanceProfile =
            toml::from_str(&text).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        assert_eq!(profile.flaw(), None, "{path:?}");
        for wrong in [-1.0, f64::NAN, 1e12] {
            let prefill = PrefillProfile { pair_us: wrong, ..profile.prefill };
            let flawed = InstanceProfile { prefill, ..profile };
            assert_eq!(flawed.flaw(), Some("prefill.pair_us"));
        }
        profiles += 1;
    }
    assert!(profiles > 0);
}

#[test]
fn one_wild_step_at_most_doubles_an_estimate_and_a_wild_estimate_comes_down_in_tens_of_steps() {
    let mut model = DecodeModel::new(DecodeProfile::default());
    let real_us = model.predict_step_us(1, 0.0);
    for _ in 0..20 {
        model.observe_step(1, 0.0, real_us);
    }
    model.observe_step(1, 0.0, real_us * 1_000);
    let doubled_us = model.predict_step_us(1, 0.0);
    assert!(doubled_us <= 2 * real_us, "{real_us} became {doubled_us}");
    for _ in 0..100 {
        model.observe_step(1, 0.0, real_us * 1_000);
    }
    assert!(model.predict_step_us(1, 0.0) > 900 * real_us);
    for _ in 0..50 {
        model.observe_step(1, 0.0, real_us);
    }
    let after_us = model.predict_step_us(1, 0.0);
    assert!(after_us < 2 * real_us, "{real_us} is predicted as {after_us}");
}
