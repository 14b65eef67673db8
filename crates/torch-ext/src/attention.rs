//! Attention without a matrix of scores, for whoever puts it together from parts: with each output come the logarithms of the sums that
//! its weights were divided by. The kernels are libtorch's.
//!
//! Method: Dao and others, "FlashAttention", arXiv 2205.14135; for float32 on a GPU, Rabe and Staats, "Self-attention Does Not Need
//! O(n^2) Memory", arXiv 2112.05682.

use crate::border::{Handle, adopt, check, handle};
use crate::error::{Error, Result};
use tch::{Device, Tensor};

unsafe extern "C" {
    fn te_attention_choice(query: Handle, key: Handle, value: Handle, choice: *mut i64) -> i32;
    fn te_attention(
        kernel: i32,
        query: Handle,
        key: Handle,
        value: Handle,
        is_causal: bool,
        scale: f64,
        output: *mut Handle,
        log_sum: *mut Handle,
    ) -> i32;
    fn te_attention_backward(
        kernel: i32,
        gradient: Handle,
        query: Handle,
        key: Handle,
        value: Handle,
        output: Handle,
        log_sum: Handle,
        is_causal: bool,
        scale: f64,
        of_query: *mut Handle,
        of_key: *mut Handle,
        of_value: *mut Handle,
    ) -> i32;
}

/// A kernel that computes attention, forward and backward, in one piece: which one, the device, the element type and the sizes decide.
///
/// Queries, keys and values are `[batch, num_heads, length, head_dim]`, of one element type, with as many heads.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use torch_ext::attention::AttentionKernel;
/// let heads = Tensor::ones([1, 2, 5, 8], (Kind::Float, Device::Cpu));
/// let kernel = AttentionKernel::find(&heads, &heads, &heads)?.expect("the CPU has one");
/// let (output, log_sum) = kernel.forward([&heads, &heads, &heads], false, 1.0)?;
/// assert_eq!((output.size(), log_sum.size()), (vec![1, 2, 5, 8], vec![1, 2, 5]));
/// // Five keys, each with a score of 8.
/// assert!((log_sum.double_value(&[0, 0, 0]) - (8.0 + 5f64.ln())).abs() < 1e-5);
/// # Ok::<(), torch_ext::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttentionKernel {
    /// FlashAttention on the CPU.
    Cpu = 0,
    /// FlashAttention on a GPU: float16 and bfloat16, where libtorch has it.
    Flash = 1,
    /// The memory-efficient kernel on a GPU: float32, and where there is no FlashAttention.
    Efficient = 2,
}

impl AttentionKernel {
    /// The one for such tensors; `None` if there is none, and attention has to be put together from operators. On a GPU `head_dim` has to be
    /// a multiple of 8, and libtorch's own choice decides (`torch.backends.cuda.enable_flash_sdp` and the like).
    ///
    /// # Errors
    /// libtorch's own, of a device.
    pub fn find(query: &Tensor, key: &Tensor, value: &Tensor) -> Result<Option<Self>> {
        let (Some(&head_dim), kind, device) = (query.size().last(), query.f_kind().ok(), query.device()) else {
            return Ok(None);
        };
        let fits = |other: &Tensor| {
            let sizes = other.size();
            other.device() == device && other.f_kind().ok() == kind && sizes.len() == 4 && sizes[3] == head_dim
        };
        if ![query, key, value].into_iter().all(fits) || query.size()[1] != key.size()[1] {
            return Ok(None);
        }
        match device {
            Device::Cpu => return Ok(Some(Self::Cpu)),
            Device::Cuda(_) if head_dim % 8 == 0 => {}
            _ => return Ok(None),
        }
        let mut choice = 0;
        // SAFETY: the tensors live through the call; a number comes back.
        let status = unsafe { te_attention_choice(handle(query), handle(key), handle(value), &raw mut choice) };
        check("AttentionKernel::find", status)?;
        // Where cuDNN's kernel could be taken, FlashAttention can.
        Ok(match choice {
            1 | 3 => Some(Self::Flash),
            2 => Some(Self::Efficient),
            _ => None,
        })
    }

    /// The output, `[batch, num_heads, num_queries, head_dim]` of the queries' element type, and the logarithms, `[batch, num_heads,
    /// num_queries]` in float32 or more. Scores are multiplied by `scale`. `is_causal`: a query sees no key after its own place, counted from
    /// the beginning of both. No gradients are recorded.
    ///
    /// # Errors
    /// Sizes that do not fit each other.
    pub fn forward(self, [query, key, value]: [&Tensor; 3], is_causal: bool, scale: f64) -> Result<(Tensor, Tensor)> {
        const OPERATION: &str = "attention";
        check_sizes(OPERATION, query, key, value)?;
        let mut results = [std::ptr::null_mut(); 2];
        let [output, log_sum] = &mut results;
        tch::no_grad(|| {
            // SAFETY: the tensors live through the call; both results are filled if it succeeds.
            let status = unsafe {
                let (query, key, value) = (handle(query), handle(key), handle(value));
                te_attention(self as i32, query, key, value, is_causal, scale, output, log_sum)
            };
            check(OPERATION, status)
        })?;
        // SAFETY: fresh handles, adopted once.
        let [output, log_sum] = results.map(|raw| unsafe { adopt(raw) });
        Ok((output, log_sum))
    }

    /// Gradients of queries, keys and values, from `gradient` of the output. `output` and `log_sum` may be those of attention to more keys
    /// than these: what comes is then the part of these keys in the gradients.
    ///
    /// # Errors
    /// Sizes that do not fit each other.
    pub fn backward(
        self,
        gradient: &Tensor,
        [query, key, value]: [&Tensor; 3],
        (output, log_sum): (&Tensor, &Tensor),
        is_causal: bool,
        scale: f64,
    ) -> Result<[Tensor; 3]> {
        const OPERATION: &str = "attention_backward";
        check_sizes(OPERATION, query, key, value)?;
        let sizes = query.size();
        let has_sizes = gradient.size() == sizes && output.size() == sizes && log_sum.size() == sizes[..3];
        if !has_sizes {
            let found = [gradient, output, log_sum].map(Tensor::size);
            return Err(Error::invalid(OPERATION, format!("{found:?} do not fit queries of {sizes:?}")));
        }
        let mut results = [std::ptr::null_mut(); 3];
        let [of_query, of_key, of_value] = &mut results;
        tch::no_grad(|| {
            // SAFETY: as above.
            let status = unsafe {
                let (query, key, value) = (handle(query), handle(key), handle(value));
                let (gradient, output, log_sum) = (handle(gradient), handle(output), handle(log_sum));
                te_attention_backward(
                    self as i32,
                    gradient,
                    query,
                    key,
                    value,
                    output,
                    log_sum,
                    is_causal,
                    scale,
                    of_query,
                    of_key,
                    of_value,
                )
            };
            check(OPERATION, status)
        })?;
        // SAFETY: fresh handles, adopted once.
        Ok(results.map(|raw| unsafe { adopt(raw) }))
    }
}

fn check_sizes(operation: &'static str, query: &Tensor, key: &Tensor, value: &Tensor) -> Result<()> {
    let [of_query, of_key, of_value] = [query, key, value].map(Tensor::size);
    let fits = of_query.len() == 4
        && of_key.len() == 4
        && of_key == of_value
        && (of_query[0], of_query[1], of_query[3]) == (of_key[0], of_key[1], of_key[3]);
    match fits {
        true => Ok(()),
        false => Err(Error::invalid(
            operation,
            format!("queries, keys and values of {of_query:?}, {of_key:?} and {of_value:?} do not fit each other"),
        )),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use tch::Kind;

    fn heads(length: i64, seed: f64) -> Tensor {
        let numbers = Tensor::arange(2 * 3 * length * 8, (Kind::Float, Device::Cpu)) * 0.7 + seed;
        numbers.sin().view([2, 3, length, 8])
    }

    /// Output, logarithms and gradients by operators.
    #[test]
    fn attention_is_what_operators_make_of_it() {
        for is_causal in [false, true] {
            let [query, key, value] = [heads(6, 0.1), heads(6, 0.5), heads(6, 0.9)].map(|t| t.set_requires_grad(true));
            let mut scores = query.matmul(&key.transpose(-2, -1)) * 0.3;
            if is_causal {
                let later = Tensor::ones([6, 6], (Kind::Bool, Device::Cpu)).triu(1);
                scores = scores.masked_fill(&later, f64::NEG_INFINITY);
            }
            let wanted = scores.softmax(-1, None).matmul(&value);
            let gradient = heads(6, 0.2);
            (&wanted * &gradient).sum(Kind::Float).backward();

            let kernel = AttentionKernel::find(&query, &key, &value).unwrap().unwrap();
            let parts = [&query.detach(), &key.detach(), &value.detach()];
            let (output, log_sum) = kernel.forward(parts, is_causal, 0.3).unwrap();
            assert!(output.allclose(&wanted, 1e-5, 1e-6, false));
            assert!(log_sum.allclose(&scores.logsumexp([-1i64], false), 1e-5, 1e-6, false));
            let found = kernel.backward(&gradient, parts, (&output, &log_sum), is_causal, 0.3).unwrap();
            for (found, leaf) in found.iter().zip([&query, &key, &value]) {
                assert!(found.allclose(&leaf.grad(), 1e-4, 1e-5, false), "{is_causal}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_and_left_to_others() {
        let (own, longer) = (heads(4, 0.1), heads(5, 0.1));
        let kernel = AttentionKernel::Cpu;
        let error = kernel.forward([&own, &own, &longer], false, 1.0).unwrap_err();
        assert!(error.message().contains("do not fit each other"), "{error}");
        let (output, log_sum) = kernel.forward([&own, &longer, &longer], false, 1.0).unwrap();
        let error = kernel.backward(&longer, [&own, &longer, &longer], (&output, &log_sum), false, 1.0).unwrap_err();
        assert!(error.message().contains("do not fit queries"), "{error}");
        let fewer = own.narrow(1, 0, 2);
        let narrow = own.narrow(3, 0, 4);
        for (key, value) in [(&fewer, &fewer), (&own, &narrow), (&own, &own.to_kind(Kind::Double))] {
            assert_eq!(AttentionKernel::find(&own, key, value).unwrap(), None);
        }
    }
}
