//! Datasets of the Hugging Face Hub: behind the cargo feature `hub`.

#[cfg(not(feature = "hub"))]
mod disabled;
#[cfg(feature = "hub")]
mod enabled;

#[cfg(not(feature = "hub"))]
pub use disabled::hub_dataset_files;
#[cfg(feature = "hub")]
pub use enabled::hub_dataset_files;

#[cfg(any(feature = "hub", test))]
use crate::error::ReaderError;
#[cfg(any(feature = "hub", test))]
use std::collections::BTreeSet;

/// Picks the files of a split out of `paths`, which the Hub writes as `config/split/0000.parquet`.
#[cfg(any(feature = "hub", test))]
fn select(repo: &str, config: Option<&str>, split: &str, paths: &[String]) -> Result<Vec<String>, ReaderError> {
    let parts = |path: &str| -> Option<[String; 2]> {
        let mut parts = path.strip_suffix(".parquet")?.split('/');
        Some([parts.next()?.to_owned(), parts.next()?.to_owned()])
    };
    let all: BTreeSet<[String; 2]> = paths.iter().filter_map(|path| parts(path)).collect();
    let configs: BTreeSet<&str> = all.iter().map(|[config, _]| config.as_str()).collect();
    let wrong = |what, asked: Option<&str>, found: Vec<&str>| {
        let found = found.into_iter().map(str::to_owned).collect();
        ReaderError::Choice { repo: repo.to_owned(), what, asked: asked.map(str::to_owned), found }
    };
    let is_only = configs.len() == 1;
    let chosen = configs.iter().copied().find(|&found| match config {
        Some(asked) => found == asked,
        None => found == "default" || is_only,
    });
    let Some(chosen) = chosen else {
        return Err(wrong("config", config, configs.into_iter().collect()));
    };
    let wanted = [chosen.to_owned(), split.to_owned()];
    let mut files: Vec<String> = paths.iter().filter(|path| parts(path).as_ref() == Some(&wanted)).cloned().collect();
    if files.is_empty() {
        let splits = all.iter().filter(|[config, _]| config == chosen).map(|[_, split]| split.as_str());
        return Err(wrong("split", Some(split), splits.collect()));
    }
    // In the order of their rows.
    files.sort();
    Ok(files)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PATHS: [&str; 6] = [
        "README.md",
        "plain/test/0000.parquet",
        "plain/train/0001.parquet",
        "plain/train/0000.parquet",
        "other/train/0000.parquet",
        "other/partial-test/0000.parquet",
    ];

    fn selected(config: Option<&str>, split: &str, paths: &[&str]) -> Result<Vec<String>, String> {
        let paths: Vec<String> = paths.iter().map(|&path| path.to_owned()).collect();
        select("owner/name", config, split, &paths).map_err(|error| error.to_string())
    }

    #[test]
    fn files_of_a_split_come_in_the_order_of_their_rows() {
        let files = selected(Some("plain"), "train", &PATHS).unwrap();
        assert_eq!(files, ["plain/train/0000.parquet", "plain/train/0001.parquet"]);
    }

    #[test]
    fn without_a_config_the_only_one_or_the_default_is_taken() {
        assert_eq!(selected(None, "test", &PATHS[..4]).unwrap(), ["plain/test/0000.parquet"]);
        let with_default = [&PATHS[..], &["default/train/0000.parquet"]].concat();
        assert_eq!(selected(None, "train", &with_default).unwrap(), ["default/train/0000.parquet"]);
    }

    #[test]
    fn what_is_missing_is_said_with_what_there_is() {
        let cases: [(Option<&str>, &str, &[&str], &str); 4] = [
            (None, "train", &PATHS, "has the configs [\"other\", \"plain\"]; choose one of them as config"),
            (Some("big"), "train", &PATHS, "has the configs [\"other\", \"plain\"]; \"big\" is none of them"),
            (Some("other"), "test", &PATHS, "has the splits [\"partial-test\", \"train\"]; \"test\" is none of them"),
            (None, "train", &["README.md"], "\"owner/name\" has the configs []"),
        ];
        for (config, split, paths, wanted) in cases {
            let message = selected(config, split, paths).unwrap_err();
            assert!(message.contains(wanted), "{message:?} lacks {wanted:?}");
        }
    }
}
