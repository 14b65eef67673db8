//! Attention without a matrix of scores, for whoever puts it together from parts: with each output come the logarithms of the sums that
//! its weights were divided by. The kernels are libtorch's.
//!
//! Method: Dao and others, "FlashAttention", arXiv 2205.14135; for float32 on a GPU, Rabe and Staats, "Self-attention Does Not Need
//! O(n^2) Memory", arXiv 2112.05682.

use crate::border::{Handle, adopt, check, handle};
use crate::error::{Error, Result};
use tch::{Device, Kind, Tensor};

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
        Ok(match choice {
            1 => Some(Self::Flash),
            2 => Some(Self::Efficient),
            _ => None,
        })
    }

    /// The output, `[batch, num_heads, num_queries, head_dim]` of the queries' element type, and the logarithms, `[batch, num_heads,
    /// num_queries]` in float32 or more. Scores are multiplied by `scale`. `is_causal`: a query sees no key after its own place, counted from
    /// the beginning of both. No gradients are recorded.
    ///
    /// # Errors
    /// Tensors that do not fit each other or the kernel; on a GPU of float16 and bfloat16, `is_causal` with other numbers of queries than of
    /// keys.
    pub fn forward(self, [query, key, value]: [&Tensor; 3], is_causal: bool, scale: f64) -> Result<(Tensor, Tensor)> {
        const OPERATION: &str = "attention";
        self.check(OPERATION, [query, key, value], is_causal)?;
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
    /// Those of [`forward`](Self::forward).
    pub fn backward(
        self,
        gradient: &Tensor,
        [query, key, value]: [&Tensor; 3],
        (output, log_sum): (&Tensor, &Tensor),
        is_causal: bool,
        scale: f64,
    ) -> Result<[Tensor; 3]> {
        const OPERATION: &str = "attention_backward";
        self.check(OPERATION, [query, key, value], is_causal)?;
        let (sizes, kind) = (query.size(), query.f_kind().ok());
        let wide = if kind == Some(Kind::Double) { Kind::Double } else { Kind::Float };
        let is_like_query =
            |other: &Tensor| other.size() == sizes && other.f_kind().ok() == kind && other.device() == query.device();
        let fits = is_like_query(gradient)
            && is_like_query(output)
            && log_sum.size() == sizes[..3]
            && log_sum.f_kind().ok() == Some(wide)
            && log_sum.device() == query.device();
        if !fits {
            let found = [gradient, output, log_sum].map(described).join(", ");
            let message = format!(
                "gradient, output and logarithms of {found} do not fit queries of {}; the logarithms are {wide:?} and have no last dim",
                described(query)
            );
            return Err(Error::invalid(OPERATION, message));
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

    /// Everything that the kernels take for granted.
    fn check(self, operation: &'static str, heads: [&Tensor; 3], is_causal: bool) -> Result<()> {
        let [query, key, value] = heads;
        let [of_query, of_key, of_value] = heads.map(Tensor::size);
        let is_like_query =
            |other: &Tensor| other.f_kind().ok() == query.f_kind().ok() && other.device() == query.device();
        let fits = of_query.len() == 4
            && of_key.len() == 4
            && of_key == of_value
            && (of_query[0], of_query[1], of_query[3]) == (of_key[0], of_key[1], of_key[3])
            && is_like_query(key)
            && is_like_query(value);
        if !fits {
            let found = heads.map(described).join(", ");
            return Err(Error::invalid(
                operation,
                format!("queries, keys and values of {found} do not fit each other"),
            ));
        }
        if (self == Self::Cpu) != (query.device() == Device::Cpu) {
            return Err(Error::invalid(operation, format!("{self:?} is no kernel for {}", described(query))));
        }
        if self == Self::Flash && is_causal && of_query[2] != of_key[2] {
            let message = format!(
                "FlashAttention counts the places of {} queries and {} keys from their ends; give as many of both",
                of_query[2], of_key[2]
            );
            return Err(Error::invalid(operation, message));
        }
        Ok(())
    }
}

/// Sizes, type and device, for messages.
fn described(tensor: &Tensor) -> String {
    let kind = tensor.f_kind().map_or_else(|_| "no type".to_owned(), |kind| format!("{kind:?}"));
    format!("{:?} {kind} on {:?}", tensor.size(), tensor.device())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

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
        let parts = [&own, &longer, &longer];
        let low = log_sum.to_kind(Kind::BFloat16);
        for (gradient, log_sum) in [(&longer, &log_sum), (&own, &low)] {
            let error = kernel.backward(gradient, parts, (&output, log_sum), false, 1.0).unwrap_err();
            assert!(error.message().contains("do not fit queries"), "{error}");
        }
        let error = AttentionKernel::Flash.forward([&own, &own, &own], false, 1.0).unwrap_err();
        assert!(error.message().contains("is no kernel for"), "{error}");
        // Heads whose elements are not beside each other.
        let turned = own.transpose(2, 3).contiguous().transpose(2, 3);
        let (found, _) = kernel.forward([&turned, &own, &own], false, 1.0).unwrap();
        let (wanted, _) = kernel.forward([&own, &own, &own], false, 1.0).unwrap();
        assert_eq!(found, wanted);
        let fewer = own.narrow(1, 0, 2);
        let narrow = own.narrow(3, 0, 4);
        for (key, value) in [(&fewer, &fewer), (&own, &narrow), (&own, &own.to_kind(Kind::Double))] {
            assert_eq!(AttentionKernel::find(&own, key, value).unwrap(), None);
        }
    }
}
