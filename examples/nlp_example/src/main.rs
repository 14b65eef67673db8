//! Trains BERT to classify texts, in one process or many: the loop is the same.
//!
//! `nlp_example --help` lists what it can be told; `README.md` beside this file shows how to start it.

use accelerate::checkpoint::check_saved_files;
use accelerate::data::{DataLoader, DataLoaderShard};
use accelerate::nn::{Module, ParamStore};
use accelerate::optim::{AcceleratedOptimizer, AcceleratedScheduler, AdamW, LinearWithWarmup, no_decay};
use accelerate::tch::{self, Tensor};
use accelerate::tracking::{LoggerType, Values};
use accelerate::{
    Accelerator, DataLoaderConfiguration, Error, MixedPrecision, PrepareModelOptions, PreparedModel,
    ProjectConfiguration, ReduceOp, Registered, SaveModelOptions, main_println, set_seed, values,
};
use accelerate_models::bert::{self, BertConfig, BertForSequenceClassification};
use accelerate_models::{CONFIG_FILE, PretrainedConfig};
use anyhow::Context;
use nlp_example::arguments::{Arguments, Precision};
use nlp_example::batch::{self, Batch};

use nlp_example::metrics::Scores;
use nlp_example::plot::History;
use nlp_example::pretrained;
use nlp_example::progress::Progress;
use nlp_example::readers::Table;
use nlp_example::splits::Splits;
use nlp_example::tokenize::{self, TOKENIZER_FILE, TextTokenizer};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

type Loader = DataLoaderShard<Batch>;
type Model = PreparedModel<BertForSequenceClassification>;

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse_line(std::env::args_os()).unwrap_or_else(|error| error.exit());
    tokenize::start_threads();
    let accelerator = accelerator(&arguments)?;
    set_seed(arguments.seed);
    // Found now, and not after hours of training.
    accelerator.check_save_directory(&arguments.output_dir)?;

    // On each machine one process fetches and reads first, so that the others find everything in the cache.
    let splits = accelerator
        .local_main_process_first(|| Splits::load(&arguments).map_err(Error::other))
        .context("no data to train on")?;
    let pretrained = accelerator.local_main_process_first(|| pretrained::folder(&arguments).map_err(Error::other))?;

    if let Some(folder) = &pretrained {
        // Sizes, tokenizer and weights have to be of one model.
        check_saved_files(folder)?;
    }
    let tokenizer = match &pretrained {
        Some(folder) => TextTokenizer::from_folder(folder)?,
        None => trained_tokenizer(&accelerator, &splits.train)?,
    };
    let config = match &pretrained {
        Some(folder) => pretrained::config_of(folder, &tokenizer, &splits.train)?,
        None => pretrained::new_config(&arguments, &tokenizer, &splits.train)?,
    };
    splits.train.check_labels(config.num_labels())?;
    splits.dev.check_labels(config.num_labels())?;
    let tokenizer = tokenizer.with_max_length(arguments.max_length.min(config.max_position_embeddings as usize))?;

    let store = ParamStore::new(accelerator.device());
    let model = BertForSequenceClassification::new(&store.root(), &config)?;
    if let Some(folder) = &pretrained {
        load_weights(&accelerator, &store, folder)?;
    }

    let mut training = Training::prepare(&accelerator, &arguments, &splits, &tokenizer, model)?;
    if accelerator.restart_count()? > 0 || arguments.resume {
        training.resume(&arguments.output_dir)?;
    }
    // Without --with_tracking there are no trackers, and these calls do nothing.
    accelerator.init_trackers("nlp_example", settings(&arguments))?;
    let Some(history) = training.run(arguments.num_epochs())? else {
        accelerator.end_training()?;
        main_println!(accelerator, "saved; --resume goes on from there");
        return Ok(());
    };
    accelerator.end_training()?;
    save(&accelerator, &training.model, &config, &tokenizer, &history, &arguments.output_dir)?;

    let scores = reload_and_evaluate(&accelerator, &splits.dev, &arguments)?;
    let trained = training.scores;
    anyhow::ensure!(
        trained == Some(scores),
        "the saved model does not do what the trained one did: {scores} after reading it back, before {trained:?}"
    );
    let (world_size, samples_per_second) = (accelerator.num_processes(), training.samples_per_second());
    main_println!(accelerator, "{scores} samples_per_second={samples_per_second:.1} world_size={world_size}");
    Ok(())
}

fn accelerator(arguments: &Arguments) -> accelerate::Result<Accelerator> {
    let mut builder = Accelerator::builder()
        .cpu(arguments.cpu)
        .dataloader_config(DataLoaderConfiguration {
            split_batches: Some(arguments.split_batches),
            // Each epoch's order depends on the seed alone, not on how many processes drew numbers before it.
            use_seedable_sampler: Some(true),
            data_seed: Some(arguments.seed),
            ..Default::default()
        })
        .project_config(ProjectConfiguration {
            project_dir: Some(arguments.output_dir.clone()),
            automatic_checkpoint_naming: Some(true),
            total_limit: Some(2),
            logging_dir: Some(arguments.logging_dir.clone()),
            // The model is read back at the end, on every machine.
            save_on_each_node: Some(true),
            ..Default::default()
        });
    if let Some(steps) = arguments.gradient_accumulation_steps {
        builder = builder.gradient_accumulation_steps(steps);
    }
    if arguments.with_tracking {
        builder = builder.log_with(LoggerType::All);
    }
    if let Some(precision) = arguments.mixed_precision {
        builder = builder.mixed_precision(match precision {
            Precision::No => MixedPrecision::No,
            Precision::Fp16 => MixedPrecision::Fp16,
            Precision::Bf16 => MixedPrecision::Bf16,
            Precision::Fp8 => MixedPrecision::Fp8,
        });
    }
    builder.build()
}

fn load_weights(accelerator: &Accelerator, store: &ParamStore, folder: &Path) -> anyhow::Result<()> {
    let new = bert::load_weights(store, folder)?;
    if !new.is_empty() {
        main_println!(accelerator, "not in the loaded model, so learned from scratch: {}", new.join(", "));
    }
    Ok(())
}

/// What trackers store of the run.
fn settings(arguments: &Arguments) -> Values {
    values! {
        "lr" => arguments.learning_rate(), "num_epochs" => arguments.num_epochs(), "seed" => arguments.seed,
        "batch_size" => arguments.batch_size,
    }
}

/// A vocabulary learned from the training split by the main process, the same everywhere.
fn trained_tokenizer(accelerator: &Accelerator, train: &Table) -> anyhow::Result<TextTokenizer> {
    let mut json = vec![String::new()];
    if accelerator.is_main_process() {
        let texts: Vec<&str> = train.rows.iter().map(|row| row.text.as_str()).collect();
        json = vec![TextTokenizer::train(&texts, pretrained::VOCABULARY_SIZE)?.to_json()?];
    }
    accelerator.broadcast_object_list(&mut json, 0)?;
    Ok(TextTokenizer::from_json(&json[0])?)
}

/// How far the run is: part of every checkpoint.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
struct Done {
    epochs: usize,
    /// Of the epochs that are done.
    history: History,
    /// Of the epoch that is under way, averaged over the processes.
    losses: Vec<f64>,
}

/// Everything the loop needs, prepared.
struct Training<'a> {
    accelerator: &'a Accelerator,
    model: Model,
    optimizer: AcceleratedOptimizer<AdamW>,
    train_loader: Loader,
    dev_loader: Loader,
    scheduler: AcceleratedScheduler<LinearWithWarmup>,
    num_labels: usize,
    done: Registered<Done>,
    save_every: Option<usize>,
    /// Time spent in training steps alone.
    time: Duration,
    num_samples: usize,
    /// After the last epoch.
    scores: Option<Scores>,
}

impl<'a> Training<'a> {
    fn prepare(
        accelerator: &'a Accelerator,
        arguments: &Arguments,
        splits: &Splits,
        tokenizer: &TextTokenizer,
        model: BertForSequenceClassification,
    ) -> anyhow::Result<Self> {
        let num_labels = model.num_labels();
        let optimizer = AdamW::builder(model.params())
            .lr(arguments.learning_rate())
            .param_groups(no_decay(model.params(), &["bias", "LayerNorm.weight"]))
            .build()?;
        let train_loader = DataLoader::builder(batch::encode(&splits.train, tokenizer)?)
            .batch_size(arguments.batch_size)
            .shuffle(true)
            .collate_fn(batch::pad_to_longest(tokenizer.pad_id()))
            .build()?;
        let dev_loader = dev_loader(&splits.dev, tokenizer, arguments)?;
        let total_steps = accelerator.num_training_steps(&train_loader, arguments.num_epochs());
        let scheduler = LinearWithWarmup::new(&optimizer, total_steps / 10, total_steps);

        let (model, optimizer, train_loader, dev_loader, scheduler) =
            accelerator.prepare((model, optimizer, train_loader, dev_loader, scheduler))?;
        let (time, num_samples, scores) = (Duration::ZERO, 0, None);
        let (done, save_every) = (accelerator.register_for_checkpointing(Done::default()), arguments.save_every);
        Ok(Self {
            accelerator,
            model,
            optimizer,
            train_loader,
            dev_loader,
            scheduler,
            num_labels,
            done,
            save_every,
            time,
            num_samples,
            scores,
        })
    }

    /// `None` if the run had to end before.
    fn run(&mut self, num_epochs: usize) -> accelerate::Result<Option<History>> {
        let total_steps = num_epochs * self.train_loader.len();
        let mut progress = match self.accelerator.is_local_main_process() {
            true => Progress::new(total_steps),
            false => Progress::hidden(),
        };
        progress.go_on_from(self.num_batches_done());
        loop {
            let epoch = self.done.lock().epochs.saturating_add(1);
            if num_epochs < epoch {
                break;
            }
            progress.begin_epoch(epoch, num_epochs);
            let Some(losses) = self.train_one_epoch(&mut progress)? else {
                progress.finish();
                return Ok(None);
            };
            let mean = losses.iter().sum::<f64>() / losses.len().max(1) as f64;
            let scores = evaluate(self.accelerator, &self.model, &self.dev_loader, self.num_labels)?;
            let mut done = self.done.lock();
            done.epochs = epoch;
            done.losses.clear();
            done.history.losses.extend(losses);
            let num_steps = done.history.losses.len();
            done.history.accuracies.push((num_steps, scores.accuracy));
            progress.print(&format!("epoch {epoch}/{num_epochs}: loss={mean:.4} {scores}"));
            let values = values! {
                "accuracy" => scores.accuracy, "f1" => scores.f1, "train_loss" => mean, "epoch" => epoch,
            };
            self.accelerator.log(values, epoch)?;
            self.scores = Some(scores);
        }
        progress.finish();
        // A run that is resumed after its last epoch has only to be judged.
        if self.scores.is_none() {
            self.scores = Some(evaluate(self.accelerator, &self.model, &self.dev_loader, self.num_labels)?);
        }
        Ok(Some(self.done.lock().history.clone()))
    }

    /// Goes on from the newest checkpoint in `folder`, if there is one.
    fn resume(&mut self, folder: &Path) -> anyhow::Result<()> {
        if self.accelerator.latest_checkpoint()?.is_none() {
            main_println!(self.accelerator, "there is no checkpoint in {}; training begins", folder.display());
            return Ok(());
        }
        let checkpoint = self.accelerator.load_state(None)?;
        let num_batches = self.num_batches_done();
        main_println!(self.accelerator, "goes on from {}, after {num_batches} batches", checkpoint.display());
        Ok(())
    }

    /// Also by runs that this one goes on from.
    fn num_batches_done(&self) -> usize {
        let done = self.done.lock();
        done.history.losses.len() + done.losses.len()
    }

    /// Goes through what is left of the training split in this epoch, and returns the loss of each of its batches, averaged
    /// over the processes. `None` if the run was asked to end, or has to be over soon: it is saved then.
    fn train_one_epoch(&mut self, progress: &mut Progress) -> accelerate::Result<Option<Vec<f64>>> {
        let Self { accelerator, model, optimizer, scheduler, done, .. } = self;
        let mut started_at = Instant::now();
        let (mut losses, mut num_steps) = (Vec::new(), 0);
        model.params().train();
        for batch in self.train_loader.iter()? {
            let batch = batch?;
            accelerator.accumulate(&*model, || {
                let loss = model.forward(&batch)?.loss;
                accelerator.backward(&loss)?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()?;
                losses.push(loss.f_detach()?);
                Ok(())
            })?;
            if let Some(loss) = losses.last() {
                let rate = scheduler.get_last_lr().first().copied().unwrap_or_default();
                progress.step(|| Ok::<_, Error>((loss.f_double_value(&[])?, rate)))?;
            }
            self.num_samples += batch.labels.size()[0] as usize * accelerator.num_processes();
            num_steps += usize::from(accelerator.sync_gradients());
            let is_due = |every: usize| accelerator.sync_gradients() && num_steps.is_multiple_of(every);
            let stops = accelerator.sync_gradients() && accelerator.should_stop()?;
            if stops || self.save_every.is_some_and(is_due) {
                self.time += started_at.elapsed();
                done.lock().losses.extend(means(accelerator, &mut losses)?);
                accelerator.save_state(None)?;
                started_at = Instant::now();
            }
            if stops {
                return Ok(None);
            }
        }
        self.time += started_at.elapsed();
        let rest = means(accelerator, &mut losses)?;
        Ok(Some(std::mem::take(&mut done.lock().losses).into_iter().chain(rest).collect()))
    }

    /// Texts learned from by all processes together, per second.
    fn samples_per_second(&self) -> f64 {
        self.num_samples as f64 / self.time.as_secs_f64().max(f64::EPSILON)
    }
}

/// The losses so far as means over the processes, in one exchange: a step has no other than that of its gradients.
fn means(accelerator: &Accelerator, losses: &mut Vec<Tensor>) -> accelerate::Result<Vec<f64>> {
    if losses.is_empty() {
        return Ok(Vec::new());
    }
    let losses = std::mem::take(losses);
    Ok(Vec::<f64>::try_from(accelerator.reduce(&Tensor::f_stack(&losses, 0)?, ReduceOp::Mean)?)?)
}

fn dev_loader(dev: &Table, tokenizer: &TextTokenizer, arguments: &Arguments) -> anyhow::Result<DataLoader<Batch>> {
    Ok(DataLoader::builder(batch::encode(dev, tokenizer)?)
        .batch_size(arguments.batch_size)
        .collate_fn(batch::pad_to_longest(tokenizer.pad_id()))
        .build()?)
}

/// Scores of the model on all rows of the loader; every process gets the same.
fn evaluate(
    accelerator: &Accelerator,
    model: &Model,
    loader: &Loader,
    num_labels: usize,
) -> accelerate::Result<Scores> {
    let _no_grad = tch::no_grad_guard();
    model.params().eval();
    let (mut predictions, mut labels) = (Vec::new(), Vec::new());
    for batch in loader.iter()? {
        let batch = batch?;
        let predicted = model.forward(&batch)?.logits.f_argmax(-1, false)?;
        // Rows that only fill up the last batch are left out here.
        let (predicted, wanted) = accelerator.gather_for_metrics(&(predicted, batch.labels))?;
        predictions.extend(Vec::<i64>::try_from(predicted)?);
        labels.extend(Vec::<i64>::try_from(wanted)?);
    }
    Ok(Scores::new(&predictions, &labels, num_labels))
}

/// Writes weights, sizes, tokenizer and loss curve; the folder can be given to `--model_name_or_path`.
fn save(
    accelerator: &Accelerator,
    model: &Model,
    config: &BertConfig,
    tokenizer: &TextTokenizer,
    history: &History,
    folder: &Path,
) -> anyhow::Result<()> {
    accelerator.wait_for_everyone()?;
    // One save: whatever happens, weights never lie beside the sizes or the tokenizer of another run.
    let files = BTreeMap::from([
        (CONFIG_FILE.to_owned(), config.to_json()?.into_bytes()),
        (TOKENIZER_FILE.to_owned(), tokenizer.to_json()?.into_bytes()),
        ("loss.svg".to_owned(), history.to_svg("BERT for text classification")?.into_bytes()),
    ]);
    accelerator.save_model(model, folder, &SaveModelOptions { files, ..Default::default() })?;
    main_println!(accelerator, "model, tokenizer and loss curve (loss.svg) are in {}", folder.display());
    accelerator.wait_for_everyone()?;
    Ok(())
}

/// Proves that the saved files hold the trained model: builds it anew from them alone and judges it again.
fn reload_and_evaluate(accelerator: &Accelerator, dev: &Table, arguments: &Arguments) -> anyhow::Result<Scores> {
    let folder = &arguments.output_dir;
    check_saved_files(folder)?;
    let config = BertConfig::from_folder(folder)?;
    let tokenizer = TextTokenizer::from_folder(folder)?
        .with_max_length(arguments.max_length.min(config.max_position_embeddings as usize))?;
    let store = ParamStore::new(accelerator.device());
    let model = BertForSequenceClassification::new(&store.root(), &config)?;
    accelerator.load_checkpoint_in_model(&store, folder)?;

    let model =
        accelerator.prepare_model(model, PrepareModelOptions { evaluation_mode: true, ..Default::default() })?;
    let loader = accelerator.prepare(dev_loader(dev, &tokenizer, arguments)?)?;
    Ok(evaluate(accelerator, &model, &loader, config.num_labels())?)
}
