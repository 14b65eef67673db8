//! Manifests for Kubernetes. What is checked was read from the schemas of JobSet 0.x and Kubeflow Trainer 2.

use accelerate_core::kubernetes::{ClusterJob, Manifest};
use accelerate_core::settings::{Document, Node, NodeValue};
use rstest::rstest;
use serde_json::{Value, json};

fn job() -> ClusterJob {
    ClusterJob {
        name: "train".to_owned(),
        image: "registry.example/train:1".to_owned(),
        num_nodes: 2,
        gpus_per_node: Some(8),
        main_process_port: None,
        max_restarts: 3,
        environment: vec![
            ("ACCELERATE_MIXED_PRECISION".to_owned(), "bf16".to_owned()),
            ("X".to_owned(), "$(A)".to_owned()),
        ],
        words: ["--mixed_precision", "bf16", "target/release/train", "--name", "a \"b\": $(C) $D"]
            .map(str::to_owned)
            .to_vec(),
    }
}

/// Read as YAML. Text that is not quoted and reads as a number or an answer is one.
fn parsed(text: &str) -> Value {
    fn value(node: &Node) -> Value {
        match &node.value {
            NodeValue::Scalar { text, is_quoted: true } => text.clone().into(),
            NodeValue::Scalar { text, .. } => serde_json::from_str(text).unwrap_or_else(|_| text.clone().into()),
            NodeValue::List(items) => items.iter().map(value).collect(),
            NodeValue::Mapping(entries) => entries
                .iter()
                .map(|(key, _, entry)| (key.clone(), value(entry)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        }
    }
    value(&Document::parse(text, "manifest.yaml".as_ref()).unwrap().root)
}

/// The keys that a schema has, among which some are needed.
#[track_caller]
fn check_keys(object: &Value, known: &[&str], needed: &[&str]) {
    let keys: Vec<_> = object.as_object().unwrap().keys().map(String::as_str).collect();
    assert!(keys.iter().all(|key| known.contains(key)), "{keys:?}");
    assert!(needed.iter().all(|key| keys.contains(key)), "{keys:?}");
}

const CONTAINER: [&str; 8] = ["args", "command", "env", "image", "name", "ports", "resources", "volumeMounts"];

#[test]
fn a_job_set_has_the_keys_and_types_of_its_schema() {
    let manifest = parsed(&job().manifest(Manifest::JobSet));
    check_keys(
        &manifest,
        &["apiVersion", "kind", "metadata", "spec", "status"],
        &["apiVersion", "kind", "metadata", "spec"],
    );
    let spec = &manifest["spec"];
    let known = [
        "coordinator",
        "failurePolicy",
        "managedBy",
        "network",
        "replicatedJobs",
        "startupPolicy",
        "successPolicy",
        "suspend",
        "ttlSecondsAfterFinished",
        "volumeClaimPolicies",
    ];
    check_keys(spec, &known, &["replicatedJobs"]);
    check_keys(&spec["network"], &["enableDNSHostnames", "publishNotReadyAddresses", "subdomain"], &[]);
    check_keys(&spec["failurePolicy"], &["maxRestarts", "restartStrategy", "rules"], &[]);
    assert_eq!(spec["failurePolicy"]["maxRestarts"], 3);
    let replicated = &spec["replicatedJobs"][0];
    check_keys(replicated, &["dependsOn", "groupName", "name", "replicas", "template"], &["name", "template"]);
    let pods = &replicated["template"]["spec"];
    check_keys(pods, &["backoffLimit", "completionMode", "completions", "parallelism", "template"], &["template"]);
    // `Indexed` wants the number of completions, and gives each pod its number and a name.
    assert_eq!(
        (&pods["completionMode"], &pods["completions"], &pods["parallelism"]),
        (&json!("Indexed"), &json!(2), &json!(2))
    );
    let pod = &pods["template"]["spec"];
    // A pod of a job says one of `Never` and `OnFailure`.
    assert_eq!(pod["restartPolicy"], "Never");
    let container = &pod["containers"][0];
    check_keys(container, &CONTAINER, &["name"]);
    // Unless it says otherwise, a pod has 64 MiB there.
    let (mount, volume) = (&container["volumeMounts"][0], &pod["volumes"][0]);
    assert_eq!((&mount["mountPath"], &mount["name"]), (&json!("/dev/shm"), &volume["name"]));
    assert_eq!(volume["emptyDir"]["medium"], "Memory");
    assert_eq!(
        (&container["image"], &container["resources"]["limits"]["nvidia.com/gpu"]),
        (&json!(job().image), &json!(8))
    );
    let of_machine = ["MACHINE_RANK", "JOBSET_RESTART_ATTEMPT"];
    check_environment(container, &of_machine, &["ACCELERATE_MIXED_PRECISION", "X", "ACCELERATE_RUN_SECRET"]);
}

#[test]
fn a_train_job_has_the_keys_and_types_of_its_schema() {
    let manifest = parsed(&job().manifest(Manifest::TrainJob));
    assert_eq!(
        (&manifest["apiVersion"], &manifest["kind"]),
        (&json!("trainer.kubeflow.org/v1alpha1"), &json!("TrainJob"))
    );
    let spec = &manifest["spec"];
    check_keys(spec, &["runtimeRef", "suspend", "trainer"], &["runtimeRef"]);
    check_keys(&spec["runtimeRef"], &["apiGroup", "kind", "name"], &["name"]);
    let trainer = &spec["trainer"];
    check_keys(trainer, &["args", "command", "env", "image", "numNodes", "numProcPerNode", "resourcesPerNode"], &[]);
    assert_eq!(
        (&trainer["numNodes"], &trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]),
        (&json!(2), &json!(8))
    );
    assert!(trainer["command"].as_array().unwrap().iter().all(Value::is_string));
    check_environment(
        trainer,
        &["JOBSET_RESTART_ATTEMPT"],
        &["ACCELERATE_MIXED_PRECISION", "X", "ACCELERATE_RUN_SECRET"],
    );
}

/// The last that a cluster takes, and the first that it does not. Ten words and two variables are there in any
/// case.
#[rstest]
#[case::words(ClusterJob { words: vec!["x".to_owned(); 118], ..job() }, None)]
#[case::words(ClusterJob { words: vec!["x".to_owned(); 119], ..job() }, Some("129 words of the command line"))]
#[case::a_word(ClusterJob { words: vec!["x".repeat(65_536)], ..job() }, None)]
#[case::a_word(ClusterJob { words: vec!["x".repeat(65_537)], ..job() }, Some("65537 bytes in a word"))]
#[case::a_word_that_is_escaped(ClusterJob { words: vec!["$".repeat(40_000)], ..job() }, Some("80000 bytes in a word"))]
#[case::variables(ClusterJob { environment: variables(126), ..job() }, None)]
#[case::variables(ClusterJob { environment: variables(127), ..job() }, Some("129 variables"))]
#[case::an_image(ClusterJob { image: "i".repeat(500), ..job() }, None)]
#[case::an_image(ClusterJob { image: "i".repeat(501), ..job() }, Some("501 bytes in the name of the image"))]
fn what_the_schema_of_a_train_job_limits(#[case] job: ClusterJob, #[case] words: Option<&str>) {
    let error = job.check(Manifest::TrainJob).err().map(|error| error.to_string());
    assert_eq!(error.is_some(), words.is_some(), "{error:?}");
    assert!(error.unwrap_or_default().contains(words.unwrap_or_default()));
    assert!(job.check(Manifest::JobSet).is_ok());
}

fn variables(number: usize) -> Vec<(String, String)> {
    (0..number).map(|number| (format!("V{number}"), "x".to_owned())).collect()
}

/// Those of the machine come from fields of the pod.
#[track_caller]
fn check_environment(container: &Value, of_machine: &[&str], others: &[&str]) {
    let variables = container["env"].as_array().unwrap();
    variables.iter().for_each(|variable| check_keys(variable, &["name", "value", "valueFrom"], &["name"]));
    let names = of_machine.iter().chain(others).copied();
    assert!(variables.iter().map(|variable| variable["name"].as_str().unwrap()).eq(names));
    for variable in &variables[..of_machine.len()] {
        check_keys(
            &variable["valueFrom"],
            &["configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef"],
            &["fieldRef"],
        );
        check_keys(&variable["valueFrom"]["fieldRef"], &["apiVersion", "fieldPath"], &["fieldPath"]);
    }
    let restarts = variables.iter().find(|variable| variable["name"] == "JOBSET_RESTART_ATTEMPT").unwrap();
    let field = &restarts["valueFrom"]["fieldRef"]["fieldPath"];
    assert_eq!(field, "metadata.labels['jobset.sigs.k8s.io/restart-attempt']");
    let value = |name: &str| variables.iter().find(|variable| variable["name"] == name).unwrap()["value"].clone();
    // Kubernetes would put a variable in place of it.
    assert_eq!((value("ACCELERATE_MIXED_PRECISION"), value("X")), (json!("bf16"), json!("$$(A)")));
}

#[rstest]
#[case(Manifest::JobSet, "train-node-0-0.train", ["2", "$(MACHINE_RANK)", "train-node-0-0.train", "29500"])]
#[case(Manifest::TrainJob, "$(PET_MASTER_ADDR)", ["$(PET_NNODES)", "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR)", "$(PET_MASTER_PORT)"])]
fn each_pod_runs_the_launch_of_its_machine(
    #[case] kind: Manifest,
    #[case] waited_for: &str,
    #[case] machines: [&str; 4],
) {
    let manifest = parsed(&job().manifest(kind));
    let container = match kind {
        Manifest::JobSet => {
            &manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
        }
        Manifest::TrainJob => &manifest["spec"]["trainer"],
    };
    let command: Vec<_> = container["command"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    assert_eq!((command[0], command[1], &command[3..6]), ("sh", "-c", &[waited_for, "accelerate", "launch"][..]));
    let flags = ["--num_machines", "--machine_rank", "--main_process_ip", "--main_process_port"];
    let wanted: Vec<_> = flags.iter().zip(machines).map(|(flag, value)| format!("{flag}={value}")).collect();
    assert_eq!(command[6..10], wanted);
    // Kubernetes would put a variable in place of the word, and makes one dollar of two.
    assert_eq!(command[10..], ["--mixed_precision", "bf16", "target/release/train", "--name", "a \"b\": $$(C) $$D"]);
}

#[rstest]
#[case("train", "train")]
#[case("My_Program.py", "my-program-py")]
#[case("7_train_", "train")]
#[case("größe", "gr--e")]
#[case("___", "accelerate")]
#[case("a-very-long-name-of-a-program-that-goes-on-and-on", "a-very-long-name-of-a-program-that-goes")]
fn names_that_kubernetes_takes(#[case] program: &str, #[case] wanted: &str) {
    let manifest = parsed(&ClusterJob { name: program.to_owned(), ..job() }.manifest(Manifest::JobSet));
    assert_eq!(manifest["metadata"]["name"], wanted);
}
