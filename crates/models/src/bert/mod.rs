//! BERT (Devlin et al. 2018, <https://arxiv.org/abs/1810.04805>), with the parameter names of Hugging Face Transformers, so that
//! weight files are exchanged with it by name.

mod attention;
mod classification;
mod config;
mod embeddings;
mod encoder;
mod init;
mod load;
mod model;

pub use classification::{Batch, BertForSequenceClassification, SequenceClassifierOutput};
pub use config::BertConfig;
pub use load::{check_sizes, has_classifier, load_weights};
pub use model::BertModel;
