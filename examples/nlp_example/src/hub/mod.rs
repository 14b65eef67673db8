//! Data sets from the Hugging Face Hub: behind the cargo feature `hub`, which is off by default.

#[cfg(not(feature = "hub"))]
mod disabled;
#[cfg(feature = "hub")]
mod enabled;

#[cfg(not(feature = "hub"))]
pub use disabled::dataset_files;
#[cfg(feature = "hub")]
pub use enabled::dataset_files;

use std::collections::BTreeSet;
use std::path::PathBuf;

/// Parquet files of a data set; either list holds at least one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DatasetFiles<T = PathBuf> {
    /// Files of the training split, in the order of their rows.
    pub train: Vec<T>,
    /// Files of the split to judge by, likewise.
    pub dev: Vec<T>,
}

/// Something wanted from the Hub cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The program was compiled without the feature.
    #[error(
        "{wanted:?} would have to come from the Hugging Face Hub, but this program was built without the cargo feature \
         `hub`; build it with `cargo build --release -p nlp_example --features hub`, or give files and folders that are on this machine"
    )]
    FeatureDisabled {
        /// Name of the data set.
        wanted: String,
    },
    /// The download failed.
    #[error("cannot fetch {wanted:?} from the Hugging Face Hub: {message}")]
    Fetch {
        /// Name of the data set.
        wanted: String,
        /// What the client said.
        message: String,
    },
    /// The configuration is unknown, or none was chosen among several.
    #[error(
        "the data set {wanted:?} has the configurations {found:?}; choose one of them with --dataset_config_name{asked}",
        asked = .asked.as_ref().map(|name| format!(" ({name:?} is none of them)")).unwrap_or_default()
    )]
    Configuration {
        /// Name of the data set.
        wanted: String,
        /// The one that was asked for.
        asked: Option<String>,
        /// Those it has.
        found: Vec<String>,
    },
    /// A split is missing.
    #[error("the data set {wanted:?} has the splits {found:?}; wanted `train` and one of {DEV_SPLITS:?}")]
    Split {
        /// Name of the data set.
        wanted: String,
        /// Those it has.
        found: Vec<String>,
    },
}

/// Names of the split to judge by, best first.
const DEV_SPLITS: [&str; 4] = ["validation", "dev", "validation_matched", "test"];

/// Picks files out of `paths`, which the Hub writes as `configuration/split/0000.parquet` in the branch
/// where it keeps every data set as Parquet.
#[cfg_attr(not(feature = "hub"), allow(dead_code))]
fn select(name: &str, configuration: Option<&str>, paths: &[String]) -> Result<DatasetFiles<String>, HubError> {
    let parts = |path: &str| -> Option<(String, String)> {
        let mut parts = path.strip_suffix(".parquet")?.split('/');
        Some((parts.next()?.to_owned(), parts.next()?.to_owned()))
    };
    let configurations: BTreeSet<String> =
        paths.iter().filter_map(|path| parts(path)).map(|(configuration, _)| configuration).collect();
    let wrong = |asked: Option<&str>| HubError::Configuration {
        wanted: name.to_owned(),
        asked: asked.map(str::to_owned),
        found: configurations.iter().cloned().collect(),
    };
    let chosen = match configuration {
        Some(asked) => configurations.get(asked).ok_or_else(|| wrong(Some(asked)))?,
        None if configurations.contains("default") => "default",
        None if configurations.len() == 1 => configurations.first().ok_or_else(|| wrong(None))?,
        None => return Err(wrong(None)),
    };
    let files = |split: &str| -> Vec<String> {
        let wanted = (chosen.to_owned(), split.to_owned());
        let mut files: Vec<_> = paths.iter().filter(|path| parts(path).as_ref() == Some(&wanted)).cloned().collect();
        files.sort();
        files
    };
    let train = files("train");
    let dev = DEV_SPLITS.iter().map(|split| files(split)).find(|files| !files.is_empty());
    match dev {
        Some(dev) if !train.is_empty() => Ok(DatasetFiles { train, dev }),
        _ => {
            let splits = paths.iter().filter_map(|path| parts(path)).filter(|(c, _)| c == chosen);
            let found: BTreeSet<String> = splits.map(|(_, split)| split).collect();
            Err(HubError::Split { wanted: name.to_owned(), found: found.into_iter().collect() })
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case::only_one(None, &["plain/train/0.parquet", "plain/test/0.parquet"], "plain/test/0.parquet")]
    #[case::default_wins(
        None,
        &["a/train/0.parquet", "a/dev/0.parquet", "default/train/0.parquet", "default/dev/0.parquet"],
        "default/dev/0.parquet"
    )]
    #[case::asked_for(
        Some("a"),
        &["a/train/0.parquet", "a/dev/0.parquet", "default/train/0.parquet", "default/dev/0.parquet"],
        "a/dev/0.parquet"
    )]
    #[case::validation_before_test(
        None,
        &["d/train/0.parquet", "d/test/0.parquet", "d/validation/0.parquet", "README.md"],
        "d/validation/0.parquet"
    )]
    fn picks_configuration_and_split(#[case] configuration: Option<&str>, #[case] paths: &[&str], #[case] dev: &str) {
        let paths: Vec<String> = paths.iter().map(|&path| path.to_owned()).collect();
        assert_eq!(select("x", configuration, &paths).unwrap().dev, [dev]);
    }

    #[test]
    fn files_of_a_split_come_in_the_order_of_their_rows() {
        let paths = ["d/train/0001.parquet", "d/test/0000.parquet", "d/train/0000.parquet"].map(String::from);
        let files = select("x", None, &paths).unwrap();
        assert_eq!(files.train, ["d/train/0000.parquet", "d/train/0001.parquet"]);
    }

    #[rstest]
    #[case::several(None, &["a/train/0.parquet", "b/train/0.parquet"], r#"["a", "b"]; choose"#)]
    #[case::unknown(Some("c"), &["a/train/0.parquet"], r#""c" is none of them"#)]
    #[case::no_dev(None, &["a/train/0.parquet"], r#"the splits ["train"]"#)]
    #[case::no_train(None, &["a/test/0.parquet"], r#"the splits ["test"]"#)]
    #[case::nothing(None, &[], "configurations []")]
    fn says_what_there_is(#[case] configuration: Option<&str>, #[case] paths: &[&str], #[case] message: &str) {
        let paths: Vec<String> = paths.iter().map(|&path| path.to_owned()).collect();
        let error = select("x", configuration, &paths).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
