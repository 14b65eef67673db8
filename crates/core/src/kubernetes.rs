//! Kubernetes: a launch on several machines as a manifest. Each pod runs one `accelerate launch`.

mod image;

use crate::Result;
use crate::environment::JOB_SET_RESTARTS_VARIABLE;
use crate::error::environment::EnvironmentErrorKind as Kind;
use crate::settings::shortened;
use crate::yaml::yaml;
use serde_json::{Map, Value, json};

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manifest {
    /// `JobSet` of `jobset.x-k8s.io/v1alpha2`.
    JobSet,
    /// `TrainJob` of Kubeflow Trainer (`trainer.kubeflow.org/v1alpha1`), with its runtime `torch-distributed`.
    TrainJob,
}

/// A launch on machines of a cluster.
///
/// ```
/// use accelerate_core::kubernetes::{ClusterJob, Manifest};
/// let job = ClusterJob { name: "train".to_owned(), num_nodes: 2, image: "registry/train:1".to_owned(), ..Default::default() };
/// assert!(job.manifest(Manifest::JobSet).starts_with("apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterJob {
    /// What the job is called, as far as [`job_name`] lets it.
    pub name: String,
    /// The image of the containers, which has to have `accelerate` and the program.
    pub image: String,
    /// How many pods there are.
    pub num_nodes: usize,
    /// How many GPUs each of them has to have.
    pub gpus_per_node: Option<usize>,
    /// The port at which ranks meet; none is 29500. A `TrainJob` leaves it to its runtime.
    pub main_process_port: Option<u16>,
    /// How often all pods are started again after one has failed. A `TrainJob` leaves this to its runtime.
    pub max_restarts: usize,
    /// Variables by which the settings of this launch reach those of the pods, without what is secret.
    pub environment: Vec<(String, String)>,
    /// Flags of the launch that are not about machines, then the program and its arguments.
    pub words: Vec<String>,
}

/// The port at which ranks meet in a cluster, where each pod has an address of its own.
const PORT: u16 = 29_500;
/// The volume through which processes of a pod exchange data, as NCCL's do. Without one they have 64 MiB, which is too little for
/// several GPUs.
const SHARED_MEMORY: &str = "shared-memory";
/// With what Kubernetes adds, a name has at most 63 characters.
const LONGEST_NAME: usize = 40;
/// Names of pods are known some time after the pods run. `$0` is that of rank 0's.
const WAIT_FOR_NAME: &str = "until getent hosts \"$0\" > /dev/null; do sleep 1; done; exec \"$@\"";

/// Numbers of both schemas have 32 bits.
const MOST_OF_SCHEMA: usize = i32::MAX as usize;
/// What the schema of a TrainJob allows, beyond which a cluster refuses it.
const MOST_ITEMS: usize = 128;
const LONGEST_WORD_BYTES: usize = 65_536;
const LONGEST_IMAGE_BYTES: usize = 500;

impl ClusterJob {
    /// Would a cluster take the manifest, and find the image by its name? The limits are those of the schema of a TrainJob
    /// (`trainjob_types.go` of Kubeflow Trainer); a JobSet has none.
    ///
    /// # Errors
    ///
    /// [`Error::is_environment`](crate::Error::is_environment): a text that cannot be the name of an image, a number of more than 32 bits;
    /// in a TrainJob more than 128
    /// words or variables, a word of more than 65536 bytes, or a name of an image of more than 500.
    ///
    /// ```
    /// use accelerate_core::kubernetes::{ClusterJob, Manifest};
    /// let job = ClusterJob { image: "train:1".to_owned(), words: vec!["x".to_owned(); 200], ..Default::default() };
    /// assert!(job.check(Manifest::JobSet).is_ok());
    /// assert!(job.check(Manifest::TrainJob).unwrap_err().to_string().contains("may have 128"));
    /// ```
    pub fn check(&self, kind: Manifest) -> Result<()> {
        // Of 0 a launch makes a free port, which other pods would not know.
        let port = usize::from(self.main_process_port.unwrap_or(PORT));
        for (what, found, least, most) in [
            ("--nodes", self.num_nodes, 0, MOST_OF_SCHEMA),
            ("--max_restarts", self.max_restarts, 0, MOST_OF_SCHEMA),
            ("--main_process_port", port, 1, usize::from(u16::MAX)),
        ] {
            if !(least..=most).contains(&found) {
                return Err(Kind::ManifestNumber { what, found, least, most }.into());
            }
        }
        if !image::is_image(&self.image) {
            return Err(Kind::Image { found: shortened(&self.image) }.into());
        }
        if kind == Manifest::JobSet {
            return Ok(());
        }
        let trainer = self.trainer("");
        let command = trainer["command"].as_array().map_or(&[][..], Vec::as_slice);
        let num_variables = trainer["env"].as_array().map_or(0, Vec::len);
        let longest = command.iter().filter_map(Value::as_str).map(str::len).max().unwrap_or(0);
        let limits = [
            (command.len(), MOST_ITEMS, "words of the command line, those of the launch itself included"),
            (num_variables, MOST_ITEMS, "variables"),
            (longest, LONGEST_WORD_BYTES, "bytes in a word of the command line"),
            (self.image.len(), LONGEST_IMAGE_BYTES, "bytes in the name of the image"),
        ];
        match limits.into_iter().find(|(found, most, _)| found > most) {
            Some((found, most, what)) => Err(Kind::TrainJobLimit { found, most, what }.into()),
            None => Ok(()),
        }
    }

    /// The text of the manifest, as YAML.
    pub fn manifest(&self, kind: Manifest) -> String {
        let name = job_name(&self.name);
        let manifest = match kind {
            Manifest::JobSet => json!({
                "apiVersion": "jobset.x-k8s.io/v1alpha2",
                "kind": "JobSet",
                "metadata": {"name": name},
                "spec": self.job_set(&name),
            }),
            Manifest::TrainJob => json!({
                "apiVersion": "trainer.kubeflow.org/v1alpha1",
                "kind": "TrainJob",
                "metadata": {"name": name},
                "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": self.trainer(&name)},
            }),
        };
        yaml(manifest.as_object().unwrap_or(&Map::new()))
    }

    fn job_set(&self, name: &str) -> Value {
        let rank = json!({
            "name": "MACHINE_RANK",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}},
        });
        let main_process_ip = format!("{name}-node-0-0.{name}");
        let port = self.main_process_port.unwrap_or(PORT);
        let machines = Machines {
            count: &self.num_nodes.to_string(),
            rank: "$(MACHINE_RANK)",
            main_process_ip: &main_process_ip,
            main_process_port: &port.to_string(),
        };
        let mut container = json!({
            "name": "launch",
            "image": self.image,
            "command": self.command(&machines),
            "env": self.variables([rank, restarts()], name),
            "ports": [{"containerPort": port}],
            "volumeMounts": [{"mountPath": "/dev/shm", "name": SHARED_MEMORY}],
        });
        if let (Some(resources), Some(container)) = (self.resources(), container.as_object_mut()) {
            container.insert("resources".to_owned(), resources);
        }
        let pods = json!({
            "backoffLimit": 0,
            "completionMode": "Indexed",
            "completions": self.num_nodes,
            "parallelism": self.num_nodes,
            "template": {"spec": {
                "containers": [container],
                "restartPolicy": "Never",
                "volumes": [{"emptyDir": {"medium": "Memory"}, "name": SHARED_MEMORY}],
            }},
        });
        json!({
            "failurePolicy": {"maxRestarts": self.max_restarts},
            "network": {"enableDNSHostnames": true, "publishNotReadyAddresses": true},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": pods}}],
        })
    }

    fn trainer(&self, name: &str) -> Value {
        let machines = Machines {
            count: "$(PET_NNODES)",
            rank: "$(PET_NODE_RANK)",
            main_process_ip: "$(PET_MASTER_ADDR)",
            main_process_port: "$(PET_MASTER_PORT)",
        };
        let mut trainer = json!({
            "command": self.command(&machines),
            "env": self.variables([restarts()], name),
            "image": self.image,
            "numNodes": self.num_nodes,
        });
        if let (Some(resources), Some(trainer)) = (self.resources(), trainer.as_object_mut()) {
            trainer.insert("resourcesPerNode".to_owned(), resources);
        }
        trainer
    }

    /// Those of the machine first, because a value may name what stands before it.
    fn variables<const N: usize>(&self, of_machine: [Value; N], name: &str) -> Vec<Value> {
        let said = self.environment.iter().map(|(name, value)| json!({"name": name, "value": literal(value)}));
        of_machine.into_iter().chain(said).chain([secret(name)]).collect()
    }

    fn resources(&self) -> Option<Value> {
        self.gpus_per_node.map(|count| json!({"limits": {"nvidia.com/gpu": count}}))
    }

    fn command(&self, machines: &Machines<'_>) -> Vec<String> {
        let start = ["sh", "-c", WAIT_FOR_NAME, machines.main_process_ip, "accelerate", "launch"].map(str::to_owned);
        let flags = [
            format!("--num_machines={}", machines.count),
            format!("--machine_rank={}", machines.rank),
            format!("--main_process_ip={}", machines.main_process_ip),
            format!("--main_process_port={}", machines.main_process_port),
        ];
        let words = self.words.iter().map(|word| literal(word));
        start.into_iter().chain(flags).chain(words).collect()
    }
}

/// What a launch is told of the machines.
struct Machines<'a> {
    count: &'a str,
    rank: &'a str,
    main_process_ip: &'a str,
    main_process_port: &'a str,
}

/// Kubernetes makes two dollars one, and puts variables in place of `$(NAME)` where the dollar is single.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

/// How often all pods have been started before, from the label that JobSet gives them. A TrainJob is a JobSet where its runtime makes
/// one, as `torch-distributed` does; elsewhere there is no such label, and the variable is empty.
fn restarts() -> Value {
    json!({
        "name": JOB_SET_RESTARTS_VARIABLE,
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}},
    })
}

/// The secret of the run, if the cluster has one under this name.
fn secret(name: &str) -> Value {
    json!({
        "name": "ACCELERATE_RUN_SECRET",
        "valueFrom": {"secretKeyRef": {"key": "secret", "name": format!("{name}-run-secret"), "optional": true}},
    })
}

/// A name that Kubernetes takes, made of this one: small letters, digits and dashes, with a letter first and no dash last.
///
/// ```
/// assert_eq!(accelerate_core::kubernetes::job_name("My_Program.py"), "my-program-py");
/// ```
pub fn job_name(name: &str) -> String {
    let plain = |character: char| match character.to_ascii_lowercase() {
        letter @ ('a'..='z' | '0'..='9') => letter,
        _ => '-',
    };
    let name: String = name.chars().map(plain).collect();
    let name = name.trim_start_matches(|character: char| !character.is_ascii_lowercase());
    let name = name.get(..LONGEST_NAME).unwrap_or(name).trim_end_matches('-');
    if name.is_empty() { "accelerate".to_owned() } else { name.to_owned() }
}
