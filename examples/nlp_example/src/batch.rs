//! From tokenised rows to what the model takes.

use crate::readers::Table;
use crate::tokenize::{TextTokenizer, TokenizeError};
use accelerate::data::VecDataset;
use accelerate::tch::Tensor;
use accelerate::{Result, TensorTree};
pub use accelerate_models::bert::Batch;

/// One labelled text as numbers.
#[derive(Clone, Debug, PartialEq, Eq, TensorTree)]
pub struct Example {
    /// Ids of word pieces.
    pub input_ids: Vec<i64>,
    /// Their segments, as many.
    pub token_type_ids: Vec<i64>,
    /// The class.
    pub label: i64,
}

/// Tokenises all rows of a table; row `i` of the result is row `i` of the table.
///
/// # Errors
/// When the tokenizers library fails.
pub fn encode(table: &Table, tokenizer: &TextTokenizer) -> Result<VecDataset<Example>, TokenizeError> {
    let texts: Vec<&str> = table.rows.iter().map(|row| row.text.as_str()).collect();
    let encoded = tokenizer.encode(&texts)?;
    let example = |(encoded, label)| {
        let crate::tokenize::Encoded { input_ids, token_type_ids } = encoded;
        Example { input_ids, token_type_ids, label }
    };
    let labels = table.rows.iter().map(|row| row.label as i64);
    Ok(VecDataset::new(encoded.into_iter().zip(labels).map(example).collect()))
}

/// A function that makes batches, each padded to its own longest text with `pad_id`.
///
/// ```
/// use accelerate::tch::Tensor;
/// use nlp_example::batch::{Example, pad_to_longest};
///
/// let row = |ids: &[i64]| Example { input_ids: ids.to_vec(), token_type_ids: vec![0; ids.len()], label: 1 };
/// let batch = pad_to_longest(9)(vec![row(&[2, 5, 3]), row(&[2, 3])])?;
/// assert_eq!(batch.input_ids, Tensor::from_slice2(&[[2i64, 5, 3], [2, 3, 9]]));
/// assert_eq!(batch.attention_mask, Tensor::from_slice2(&[[1i64, 1, 1], [1, 1, 0]]));
/// # Ok::<(), accelerate::Error>(())
/// ```
pub fn pad_to_longest(pad_id: i64) -> impl Fn(Vec<Example>) -> Result<Batch> + Send + Sync {
    move |rows| {
        let length = rows.iter().map(|row| row.input_ids.len()).max().unwrap_or_default();
        let matrix = |values: &dyn Fn(&Example) -> Vec<i64>, filler: i64| -> Result<Tensor> {
            let mut flat = Vec::with_capacity(rows.len() * length);
            for row in &rows {
                flat.extend(values(row));
                flat.resize(flat.len().next_multiple_of(length.max(1)), filler);
            }
            Ok(Tensor::f_from_slice(&flat)?.f_view([rows.len() as i64, length as i64])?)
        };
        let labels: Vec<i64> = rows.iter().map(|row| row.label).collect();
        Ok(Batch {
            input_ids: matrix(&|row| row.input_ids.clone(), pad_id)?,
            attention_mask: matrix(&|row| vec![1; row.input_ids.len()], 0)?,
            token_type_ids: matrix(&|row| row.token_type_ids.clone(), 0)?,
            labels: Tensor::f_from_slice(&labels)?,
        })
    }
}
