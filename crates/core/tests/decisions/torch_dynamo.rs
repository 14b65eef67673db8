//! Which compiler is chosen, and what is refused.

use accelerate_core::config::{Compilation, DynamoBackend, DynamoMode, TorchDynamoPlugin};
use accelerate_core::environment::LaunchSettings;

fn from_variables(variables: &[(&str, &str)]) -> accelerate_core::Result<TorchDynamoPlugin> {
    let lookup = |name: &str| {
        let name = name.strip_prefix("ACCELERATE_DYNAMO_")?;
        variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    };
    Ok(LaunchSettings::read(&lookup)?.dynamo)
}

#[test]
fn variables_are_those_of_the_reference() {
    assert_eq!(from_variables(&[]).unwrap(), TorchDynamoPlugin::default());
    let all = [
        ("BACKEND", "TS"),
        ("MODE", "max-autotune"),
        ("USE_FULLGRAPH", "True"),
        ("USE_DYNAMIC", "False"),
        ("USE_REGIONAL_COMPILATION", "1"),
    ];
    let wanted = TorchDynamoPlugin {
        backend: Some(DynamoBackend::Ts),
        mode: Some(DynamoMode::MaxAutotune),
        fullgraph: Some(true),
        dynamic: Some(false),
        options: None,
        disable: false,
        use_regional_compilation: Some(true),
    };
    assert_eq!(from_variables(&all).unwrap(), wanted);
    for (name, value) in [("BACKEND", "fast"), ("MODE", "best"), ("USE_FULLGRAPH", "2"), ("USE_DYNAMIC", "maybe")] {
        let error = from_variables(&[(name, value)]).unwrap_err();
        assert!(error.is_environment(), "{error}");
        assert!(error.to_string().contains(name) && error.to_string().contains(value), "{error}");
    }
}

#[test]
fn what_is_given_goes_before_the_environment() {
    let given = TorchDynamoPlugin { backend: Some(DynamoBackend::No), dynamic: Some(true), ..Default::default() };
    let environment = from_variables(&[("BACKEND", "ts"), ("USE_DYNAMIC", "no"), ("USE_FULLGRAPH", "yes")]).unwrap();
    let both = given.or(environment);
    assert_eq!((both.backend, both.dynamic, both.fullgraph), (Some(DynamoBackend::No), Some(true), Some(true)));
}

#[test]
fn every_backend_is_something_or_an_error_that_says_why() {
    for &backend in DynamoBackend::ALL {
        let plugin = TorchDynamoPlugin::from(backend);
        let wanted = match backend {
            DynamoBackend::No | DynamoBackend::Eager => Some(Compilation::None),
            DynamoBackend::Ts => Some(Compilation::TorchScript),
            DynamoBackend::AotInductor => Some(Compilation::AotInductor),
            DynamoBackend::Cudagraphs => Some(Compilation::CudaGraphs),
            _ => None,
        };
        match wanted {
            Some(wanted) => assert_eq!(plugin.compilation().unwrap(), wanted),
            None => {
                let error = plugin.compilation().unwrap_err();
                let text = error.to_string();
                assert!(error.is_config() && text.contains(backend.as_str()), "{text}");
                assert!(text.contains("needs Python") && text.contains("\"ts\""), "{text}");
            }
        }
        let off = TorchDynamoPlugin { disable: true, fullgraph: Some(true), ..plugin };
        assert_eq!(off.compilation().unwrap(), Compilation::None);
    }
}

#[test]
fn a_setting_without_use_is_refused_by_name() {
    let options = serde_json::from_str(r#"{"max_autotune": true}"#).unwrap();
    let plain = TorchDynamoPlugin::default;
    let wishes = [
        ("mode", TorchDynamoPlugin { mode: Some(DynamoMode::ReduceOverhead), ..plain() }),
        ("fullgraph", TorchDynamoPlugin { fullgraph: Some(true), ..plain() }),
        ("dynamic", TorchDynamoPlugin { dynamic: Some(true), ..plain() }),
        ("options", TorchDynamoPlugin { options: Some(options), ..plain() }),
        ("use_regional_compilation", TorchDynamoPlugin { use_regional_compilation: Some(true), ..plain() }),
    ];
    for backend in ["no", "eager", "ts", "aot_inductor", "cudagraphs"] {
        for (field, wish) in &wishes {
            let plugin = TorchDynamoPlugin { backend: Some(backend.parse().unwrap()), ..wish.clone() };
            let text = plugin.compilation().unwrap_err().to_string();
            assert!(text.contains(&format!("TorchDynamoPlugin.{field} is")), "{text}");
            assert!(text.contains(&format!("backend \"{backend}\"")), "{text}");
        }
        // What launchers write without being asked.
        let plugin = TorchDynamoPlugin {
            backend: Some(backend.parse().unwrap()),
            mode: Some(DynamoMode::Default),
            fullgraph: Some(false),
            dynamic: Some(false),
            use_regional_compilation: Some(false),
            ..plain()
        };
        plugin.compilation().unwrap();
    }
}

#[test]
fn a_plugin_is_read_from_files() {
    let plugin: TorchDynamoPlugin = serde_json::from_str(r#"{"backend": "TS", "mode": "default"}"#).unwrap();
    assert_eq!((plugin.backend, plugin.mode), (Some(DynamoBackend::Ts), Some(DynamoMode::Default)));
    assert_eq!(
        serde_json::from_str::<TorchDynamoPlugin>(r#"{"backend": false}"#).unwrap().backend,
        Some(DynamoBackend::No)
    );
    assert!(serde_json::from_str::<TorchDynamoPlugin>(r#"{"backends": "ts"}"#).is_err());
}
