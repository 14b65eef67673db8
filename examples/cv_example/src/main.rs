//! Trains a ResNet to tell shapes apart, in one process or many: the loop is the same.
//!
//! `cv_example --help` lists what it can be told; `README.md` beside this file shows how to start it.

use accelerate::data::{DataLoader, DataLoaderShard, TensorDataset};
use accelerate::metrics::{Accuracy, F1, F1Average};
use accelerate::nn::{Module, ParamStore};
use accelerate::optim::{AdamW, LinearWithWarmup};
use accelerate::tch::{self, Tensor};
use accelerate::{
    Accelerator, DataLoaderConfiguration, Error, MixedPrecision, PreparedModel, SaveModelOptions, main_println,
    set_seed,
};
use accelerate_models::hub::model_folder;
use accelerate_models::resnet::{ResNetConfig, ResNetForImageClassification};
use accelerate_models::{CONFIG_FILE, ImageClassificationInput, LoadOptions, PretrainedConfig, PretrainedModel};
use anyhow::{Result, ensure};
use cv_example::arguments::{Arguments, Precision};
use cv_example::images::{self, SHAPES};
use std::collections::BTreeMap;

type Batch = (Tensor, Tensor);
type Model = PreparedModel<ResNetForImageClassification>;

fn main() -> Result<()> {
    let arguments = Arguments::parse_line(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let accelerator = accelerator(&arguments)?;
    set_seed(arguments.seed);
    // Found now, and not after hours of training.
    accelerator.check_save_directory(&arguments.output_dir)?;
    let (config, model) = model(&accelerator, &arguments)?;
    let loader = |num_images, seed, shuffle| -> Result<DataLoader<Batch>> {
        let rows = TensorDataset::new(images::draw(num_images, seed)?)?;
        // A batch of one image has no variance to normalise by.
        Ok(DataLoader::builder(rows).batch_size(arguments.batch_size).shuffle(shuffle).drop_last(shuffle).build()?)
    };
    // Images to judge by are never among those that were learned from.
    let train = loader(arguments.num_train, arguments.seed, true)?;
    let validation = loader(arguments.num_validation, arguments.seed ^ u64::MAX, false)?;
    let optimizer = AdamW::builder(model.params()).lr(arguments.learning_rate).weight_decay(0.01).build()?;
    let num_steps = accelerator.num_training_steps(&train, arguments.num_epochs);
    ensure!(num_steps > 0, "--num_train {} makes no whole batch of {}", arguments.num_train, arguments.batch_size);
    let scheduler = LinearWithWarmup::new(&optimizer, num_steps / 10, num_steps);
    let (model, mut optimizer, train, validation, mut scheduler) =
        accelerator.prepare((model, optimizer, train, validation, scheduler))?;

    for epoch in 1..=arguments.num_epochs {
        model.params().train();
        let (mut sum, mut count) = (0.0, 0);
        for batch in train.iter()? {
            let (pixel_values, labels) = batch?;
            let input = ImageClassificationInput { pixel_values, labels: Some(labels) };
            accelerator.accumulate(&model, || {
                let loss = model.forward(&input)?.loss.ok_or_else(|| Error::other("a batch without labels"))?;
                accelerator.backward(&loss)?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()?;
                sum += loss.f_double_value(&[])?;
                count += 1;
                Ok(())
            })?;
        }
        let (accuracy, f1) = evaluate(&accelerator, &model, &validation)?;
        let (loss, num_epochs) = (sum / f64::from(count), arguments.num_epochs);
        let (accuracy, f1) = (accuracy.compute(), f1.compute());
        main_println!(accelerator, "epoch {epoch}/{num_epochs}: loss={loss:.4} accuracy={accuracy:.4} f1={f1:.4}");
    }

    accelerator.wait_for_everyone()?;
    let files = BTreeMap::from([(CONFIG_FILE.to_owned(), config.to_json()?.into_bytes())]);
    accelerator.save_model(&model, &arguments.output_dir, &SaveModelOptions { files, ..Default::default() })?;
    main_println!(accelerator, "the model is in {}", arguments.output_dir.display());
    Ok(())
}

fn accelerator(arguments: &Arguments) -> accelerate::Result<Accelerator> {
    let mut builder = Accelerator::builder().cpu(arguments.cpu).dataloader_config(DataLoaderConfiguration {
        // Each epoch's order depends on the seed alone, not on how many processes drew numbers before it.
        use_seedable_sampler: Some(true),
        data_seed: Some(arguments.seed),
        ..Default::default()
    });
    if let Some(steps) = arguments.gradient_accumulation_steps {
        builder = builder.gradient_accumulation_steps(steps);
    }
    if let Some(precision) = arguments.mixed_precision {
        builder = builder.mixed_precision(match precision {
            Precision::No => MixedPrecision::No,
            Precision::Fp16 => MixedPrecision::Fp16,
            Precision::Bf16 => MixedPrecision::Bf16,
        });
    }
    builder.build()
}

/// From a folder, or a new one of a size that suits the images.
fn model(accelerator: &Accelerator, arguments: &Arguments) -> Result<(ResNetConfig, ResNetForImageClassification)> {
    if let Some(name) = &arguments.model_name_or_path {
        // On each machine one process fetches what is not there yet.
        let folder =
            accelerator.local_main_process_first(|| model_folder(name, None).map_err(accelerate::Error::other))?;
        let config = ResNetConfig::from_folder(&folder)?;
        let (found, wanted) = (config.num_labels(), SHAPES.len());
        ensure!(found == wanted, "the model in {} has {found} classes; there are {wanted} shapes", folder.display());
        let options = LoadOptions { dtype: Some(tch::Kind::Float), device: accelerator.device(), ..Default::default() };
        let (model, _) = ResNetForImageClassification::from_pretrained(&folder, &options)?;
        return Ok((config, model));
    }
    let config = ResNetConfig {
        embedding_size: 16,
        hidden_sizes: vec![16, 32, 64],
        depths: vec![1, 1, 1],
        id2label: SHAPES.iter().enumerate().map(|(label, name)| (label, (*name).to_owned())).collect(),
        ..ResNetConfig::resnet18(SHAPES.len())
    };
    let store = ParamStore::new(accelerator.device());
    let model = ResNetForImageClassification::new(&store.root(), &config)?;
    Ok((config, model))
}

/// On all images of the loader; every process gets the same.
fn evaluate(
    accelerator: &Accelerator,
    model: &Model,
    loader: &DataLoaderShard<Batch>,
) -> accelerate::Result<(Accuracy, F1)> {
    let _no_grad = tch::no_grad_guard();
    model.params().eval();
    let (mut accuracy, mut f1) = (Accuracy::default(), F1::new(F1Average::Macro));
    for batch in loader.iter()? {
        let (pixel_values, labels) = batch?;
        let logits = model.forward(&ImageClassificationInput { pixel_values, labels: None })?.logits;
        let predictions = logits.f_argmax(-1, false)?;
        accuracy.add_batch(accelerator, &predictions, &labels)?;
        f1.add_batch(accelerator, &predictions, &labels)?;
    }
    Ok((accuracy, f1))
}
