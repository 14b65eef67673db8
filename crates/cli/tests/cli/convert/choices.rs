//! What `accelerate checkpoint convert` takes where a folder says something twice.

use std::fs;

use serde_json::Value;

use super::{copied, description, run};
use crate::support::{accelerate, finished};

/// A whole model beside the parts of one, which may be of another step: merge-weights and convert agree.
#[test]
fn a_model_that_is_there_whole_and_in_parts_is_an_error_that_names_both() {
    let folder = copied("fsdp2");
    let src = folder.path().join("src");
    let both = "whole in `pytorch_model_fsdp.bin`, and in parts in the folder `pytorch_model_fsdp_0`";
    fs::write(src.join("pytorch_model_fsdp.bin"), "").unwrap();
    run(folder.path(), "convert src dst").expect(1, &["which files of src are meant", both]);
    let merge = || {
        let mut command = accelerate();
        command.args(["merge-weights", "src", "merged"]).current_dir(folder.path());
        finished(command)
    };
    merge().expect(1, &["which weights of src are meant", both, "move the other one out of the folder"]);
    assert!(!folder.path().join("dst").exists() && !folder.path().join("merged").exists());
    fs::remove_file(src.join("pytorch_model_fsdp.bin")).unwrap();
    run(folder.path(), "convert src dst").expect(0, &[]);
    merge().expect(1, &["there is one in src/pytorch_model_fsdp_0"]);
}

/// The names that an optimizer has saved are not overridden by a list of another run.
#[test]
fn given_names_that_the_optimizer_contradicts_are_an_error() {
    let folder = copied("named");
    let names = |change: fn(&mut Vec<String>)| {
        let groups = &description(&folder.path().join("dst")).objects["optimizer"].values["param_groups"];
        let of_group = |group: &Value| serde_json::from_value::<Vec<String>>(group["params"].clone()).unwrap();
        let mut names: Vec<String> = groups.as_array().unwrap().iter().flat_map(of_group).collect();
        change(&mut names);
        fs::write(folder.path().join("names.txt"), names.join("\n")).unwrap();
    };
    run(folder.path(), "convert src dst").expect(0, &[]);
    names(|_| ());
    let found = run(folder.path(), "convert src same --parameter_names names.txt");
    found.expect(0, &[]);
    assert!(found.stdout.contains("the names that the optimizer saved"), "{}", found.stdout);
    names(|names| names.swap(0, 1));
    run(folder.path(), "convert src other --parameter_names names.txt")
        .expect(1, &["by the optimizer itself", "leave the flag out"]);
}
