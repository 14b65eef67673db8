//! Which compiler is chosen, and what is refused.

use accelerate_core::config::{
    Compilation, DynamoBackend, DynamoMode, DynamoSettings, RunConfig, Sources, TorchDynamoPlugin,
};

fn from_variables(variables: &[(&str, &str)]) -> accelerate_core::Result<DynamoSettings> {
    let lookup = |name: &str| {
        let name = name.strip_prefix("ACCELERATE_DYNAMO_")?;
        variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
    };
    Ok(RunConfig::resolve(Sources { environment: Some(&lookup), ..Default::default() })?.dynamo)
}

#[test]
fn variables_are_those_of_the_reference() {
    assert_eq!(from_variables(&[]).unwrap(), DynamoSettings::default());
    let all = [
        ("BACKEND", "TS"),
        ("MODE", "max-autotune"),
        ("USE_FULLGRAPH", "True"),
        ("USE_DYNAMIC", "False"),
        ("USE_REGIONAL_COMPILATION", "1"),
        ("DISABLE", "yes"),
    ];
    let wanted = DynamoSettings {
        backend: DynamoBackend::Ts,
        mode: DynamoMode::MaxAutotune,
        fullgraph: true,
        dynamic: Some(false),
        options: None,
        disable: true,
        use_regional_compilation: true,
    };
    assert_eq!(from_variables(&all).unwrap(), wanted);
    for (name, value) in [("BACKEND", "fast"), ("MODE", "best"), ("USE_FULLGRAPH", "2"), ("USE_DYNAMIC", "maybe")] {
        let error = from_variables(&[(name, value)]).unwrap_err();
        assert!(error.is_environment(), "{error}");
        assert!(error.to_string().contains(name) && error.to_string().contains(value), "{error}");
    }
}

#[test]
fn every_backend_is_something_or_an_error_that_says_why() {
    for &backend in DynamoBackend::ALL {
        let plugin = DynamoSettings { backend, ..Default::default() };
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
        let off = DynamoSettings { disable: true, fullgraph: true, ..plugin };
        assert_eq!(off.compilation().unwrap(), Compilation::None);
    }
}

#[test]
fn a_setting_without_use_is_refused_by_name() {
    let options = serde_json::from_str(r#"{"max_autotune": true}"#).unwrap();
    let plain = DynamoSettings::default;
    let wishes = [
        ("mode", DynamoSettings { mode: DynamoMode::ReduceOverhead, ..plain() }),
        ("fullgraph", DynamoSettings { fullgraph: true, ..plain() }),
        ("dynamic", DynamoSettings { dynamic: Some(true), ..plain() }),
        ("options", DynamoSettings { options: Some(options), ..plain() }),
        ("use_regional_compilation", DynamoSettings { use_regional_compilation: true, ..plain() }),
    ];
    for backend in ["no", "eager", "ts", "aot_inductor", "cudagraphs"] {
        for (field, wish) in &wishes {
            let plugin = DynamoSettings { backend: backend.parse().unwrap(), ..wish.clone() };
            let text = plugin.compilation().unwrap_err().to_string();
            assert!(text.contains(&format!("TorchDynamoPlugin.{field} is")), "{text}");
            assert!(text.contains(&format!("backend \"{backend}\"")), "{text}");
        }
        // What launchers write without being asked.
        let plugin = DynamoSettings {
            backend: backend.parse().unwrap(),
            mode: DynamoMode::Default,
            fullgraph: false,
            dynamic: Some(false),
            use_regional_compilation: false,
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
