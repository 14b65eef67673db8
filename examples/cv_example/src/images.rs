//! Small images that the program draws by itself: a shape of one colour on a ground of another, with noise.
//!
//! Which shape it is, is to be found out. Colours, sizes, places and noise say nothing about it.

use accelerate::tch::{Device, Kind, Tensor};
use anyhow::Result;

/// Names of the classes, by label.
pub const SHAPES: [&str; 5] = ["disc", "square", "ring", "cross", "stripes"];

/// Height and width.
pub const SIDE: usize = 32;

/// Images `[num_images, 3, 32, 32]`, float32 between 0 and 1 but for the noise, and labels `[num_images]`, int64. The same seed draws
/// the same images on every machine, as many of each shape.
///
/// ```
/// let (images, labels) = cv_example::images::draw(10, 1)?;
/// assert_eq!((images.size(), labels.size()), (vec![10, 3, 32, 32], vec![10]));
/// # Ok::<(), anyhow::Error>(())
/// ```
///
/// # Errors
/// The memory does not suffice.
pub fn draw(num_images: usize, seed: u64) -> Result<(Tensor, Tensor)> {
    let mut random = Random(seed);
    let mut pixels = Vec::with_capacity(num_images * 3 * SIDE * SIDE);
    for image in 0..num_images {
        draw_one(&mut random, image % SHAPES.len(), &mut pixels);
    }
    let side = SIDE as i64;
    let images = Tensor::f_from_slice(&pixels)?.f_view([num_images as i64, 3, side, side])?;
    let labels: Vec<i64> = (0..num_images).map(|image| (image % SHAPES.len()) as i64).collect();
    Ok((images.f_to_kind(Kind::Float)?.f_to(Device::Cpu)?, Tensor::f_from_slice(&labels)?))
}

fn draw_one(random: &mut Random, shape: usize, pixels: &mut Vec<f32>) {
    let radius = random.between(6.0, 11.0);
    let [row, column] = [0; 2].map(|_| random.between(radius, SIDE as f32 - radius));
    let ground: [f32; 3] = std::array::from_fn(|_| random.between(0.0, 1.0));
    // Far enough from the ground to be seen.
    let colour: [f32; 3] = std::array::from_fn(|channel| (ground[channel] + random.between(0.35, 0.65)) % 1.0);
    for channel in 0..3 {
        for y in 0..SIDE {
            for x in 0..SIDE {
                let (down, right) = ((y as f32 - row) / radius, (x as f32 - column) / radius);
                let value = if is_inside(shape, down, right) { colour[channel] } else { ground[channel] };
                pixels.push(value + random.between(-0.1, 0.1));
            }
        }
    }
}

/// In units of the radius, from the middle.
fn is_inside(shape: usize, down: f32, right: f32) -> bool {
    let (distance, furthest) = (down.hypot(right), down.abs().max(right.abs()));
    match shape {
        0 => distance < 1.0,
        1 => furthest < 0.85,
        2 => distance < 1.0 && distance > 0.55,
        3 => furthest < 1.0 && down.abs().min(right.abs()) < 0.3,
        _ => furthest < 0.95 && ((down + 1.0) * 2.5).rem_euclid(2.0) < 1.0,
    }
}

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn between(&mut self, low: f32, high: f32) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        low + (high - low) * ((mixed >> 40) as f32 / (1u64 << 24) as f32)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_draws_the_same_images_and_another_one_others() {
        let images = |seed| draw(10, seed).unwrap().0;
        assert_eq!(images(3), images(3));
        assert_ne!(images(3), images(4));
        assert!(images(3).min().double_value(&[]) > -0.2 && images(3).max().double_value(&[]) < 1.2);
    }
}
