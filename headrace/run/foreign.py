"""Keys that people bring along from axolotl, transformers and TRL, DeepSpeed, torchtune or LLaMA-Factory, and
what answers them here.
"""

from collections.abc import Mapping

HERE = {
    "model.path": """base_model base_model_config checkpoint_dir checkpointer model_id model_name
        model_name_or_path model_revision pretrained_model_name_or_path random_init_weights
        revision_of_model""",
    "model.dtype": """bf16 bf16_full_eval bfloat16 data_types mixed_precision param_dtype precision
        pure_bf16 torch_autocast torch_dtype""",
    "model.lora": """adapter adapter_name_or_path finetuning_type lora lora_model_dir peft peft_config
        use_peft""",
    "model.lora.rank": "lora_r lora_rank r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.targets": """apply_lora_to_mlp apply_lora_to_output lora_attn_modules lora_target
        lora_target_linear lora_target_modules target_modules""",
    "data.train": """data_files data_path dataset dataset_dir dataset_name dataset_path datasets
        pretraining_dataset train_dataset train_file train_files""",
    "data.eval": """dataset_val eval_dataset eval_file test_datasets val_set_size val_size validation_file
        validation_split""",
    "data.format": "dataset_format ds_type formatting",
    "data.loss_on": """assistant_only_loss completion_only_loss mask_history roles_to_train train_on_eos
        train_on_eot train_on_input train_on_inputs train_on_prompt""",
    "data.context": """block_size cutoff_len max_length max_prompt_length max_seq_len max_seq_length
        model_max_length seq_len seq_length sequence_len sequence_length""",
    "data.packing": """eval_packing eval_sample_packing multipack_real_batches neat_packing packed
        packing_strategy padding_free sample_packing""",
    "data.over_long": "excess_length_strategy truncation_mode",
    "train.epochs": "max_epochs n_epochs num_epochs num_train_epochs",
    "train.steps": """max_steps max_train_steps num_steps num_training_steps total_num_steps total_steps
        train_iters""",
    "train.batch": "effective_batch_size global_batch_size train_batch_size",
    "train.micro_batch": """auto_find_batch_size micro_batch_size per_device_batch_size
        per_device_train_batch_size train_micro_batch_size_per_gpu""",
    "train.eval_every": """do_eval eval_delay eval_interval eval_on_start eval_steps eval_strategy
        evals_per_epoch evaluation_strategy run_val_every_n_steps""",
    "train.seed": "data_seed full_determinism random_seed",
    "train.compile": "compile torch_compile torch_compile_backend torch_compile_mode",
    "optim.lr": "base_lr initial_lr learning_rate max_lr peak_lr",
    "optim.schedule": "lr_scheduler lr_scheduler_type scheduler",
    "optim.warmup": "lr_warmup_steps num_warmup_steps warmup_num_steps warmup_ratio warmup_steps",
    "optim.min_lr": "cosine_min_lr_ratio lr_min_ratio min_lr_ratio",
    "optim.weight_decay": "wd",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.eps": "adam_epsilon epsilon",
    "optim.max_grad_norm": """clip_grad_norm grad_clip gradient_clip_algorithm gradient_clip_val
        gradient_clipping max_norm""",
    "update.bucket": "allgather_bucket_size reduce_bucket_size sub_group_size",
    "memory.device": "device gpu_memory_limit",
    "memory.disk": "aio nvme_path offload_dir offload_folder",
    "memory.weights": "offload_param",
    "memory.states": """cpu_offload fsdp_offload_params offload_optimizer offload_params optimizer_offload
        zero_force_ds_cpu_optimizer""",
    "memory.activations": """activation_checkpointing activation_checkpointing_kwargs
        activation_offloading enable_activation_checkpointing enable_activation_offloading
        gradient_checkpointing gradient_checkpointing_kwargs use_gradient_checkpointing""",
    "checkpoint.every": """save_every save_every_n_steps save_interval save_steps save_strategy
        saves_per_epoch""",
    "checkpoint.states": "save_only_model",
    "checkpoint.keep": "keep_last_n_checkpoints save_total_limit",
    "checkpoint.resume": """auto_resume_from_checkpoints overwrite_output_dir recipe_checkpoint resume
        resume_from_checkpoint""",
    "report": "log_with metric_logger report_to tensorboard use_tensorboard use_wandb wandb",
    "out": "default_root_dir log_dir logging_dir out_dir output_dir save_dir",
}
"""Key of the run file -> names of the same elsewhere. A key that the run file does not have does not answer:
then :data:`SENTENCES` does.
"""

SENTENCES = {
    "it follows from train.batch and train.micro_batch": """accumulate_grad_batches accumulation_steps
        grad_accum_dtype grad_accum_steps gradient_accumulation gradient_accumulation_steps
        managed_gradient_accumulation""",
    "train.batch counts a step's sequences, train.micro_batch those of one forward": "batch_size",
    "evaluation runs in micro-batches of train.micro_batch": """batch_eval_metrics batch_size_val
        eval_accumulation_steps eval_batch_size per_device_eval_batch_size""",
    "the optimizer is AdamW with fp32 master weights, set by optim": """adamw_kwargs optim_args
        optim_target_modules optimizer optimizer_in_bwd optimizer_name zero_allow_untested_optimizer""",
    "here: optim.beta1 and optim.beta2": "betas",
    "here: optim.schedule, optim.warmup, optim.decay and optim.min_lr": """lr_quadratic_warmup
        lr_scheduler_kwargs""",
    "here: memory.states and memory.weights say what leaves the device": "zero_optimization zero_stage",
    "here: update.policy": "zenflow",
    "model.dtype can be bf16 or fp32": """amp float16 fp16 fp16_full_eval half_precision_backend
        loss_scale tf32""",
    "every step stands in metrics.jsonl": """disable_tqdm dump_state flops_profiler
        include_num_input_tokens_seen log_every_n_steps log_level log_level_replica log_on_each_node
        log_peak_memory_stats logging_first_step logging_nan_inf_filter logging_steps logging_strategy
        plot_loss profiler skip_memory_metrics steps_per_print wall_clock_breakdown""",
    "ask for W&B with report: [wandb], and name its project in WANDB_PROJECT": """project run_name
        wandb_entity wandb_log_model wandb_mode wandb_name wandb_project wandb_run_id wandb_watch""",
    "report can be tensorboard or wandb": """comet_ml_api_key mlflow_experiment_name mlflow_tracking_uri
        trackio_bucket_id trackio_space_id trackio_static_space_id use_mlflow""",
    "attention is chosen for each document and needs no setting": """attention attn_implementation
        eager_attention flash_attention flash_attn flash_attn_cross_entropy flex_attention s2_attention
        sdp_attention sdpa_attention use_cache use_flash_attention xformers_attention""",
    "the loss never holds more than train.loss_chunk tokens' logits": """cut_cross_entropy
        enable_liger_kernel liger_cross_entropy liger_fused_linear_cross_entropy liger_glu_activation
        liger_kernel_config liger_rms_norm liger_rope loss loss_type num_output_chunks plugins
        use_liger_kernel""",
    "the loss is the mean cross-entropy over all trained tokens of a step": """average_tokens_across_devices
        label_smoother label_smoothing_factor loss_watchdog_patience loss_watchdog_threshold
        neftune_noise_alpha prediction_loss_only router_aux_loss_coef""",
    "weights are trained in bf16 or fp32, never quantised": """bnb_config_kwargs gptq load_in_4bit
        load_in_8bit qat quantization quantization_bit quantizer quantizer_bits""",
    "adapters are plain: model.lora has rank, alpha and targets": """lora_dropout lora_fan_in_fan_out
        lora_modules_to_save lora_on_cpu modules_to_save peft_use_dora peft_use_rslora use_dora use_rslora""",
    "which weights are trained cannot be chosen": """freeze_trainable_layers freeze_trainable_modules
        unfrozen_parameters""",
    "models are not compiled": HERE["train.compile"],
    "nothing is kept on disk but checkpoints; memory.states says where states live": HERE["memory.disk"],
    "checkpoints always hold all that a run goes on from": HERE["checkpoint.states"],
    "a run uses one device, or RAM": """accelerator_config communication_data_type context_parallel_size
        ddp ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
        ddp_static_graph ddp_timeout debug deepspeed deepspeed_config device_map distributed_type fsdp
        fsdp_config fsdp_version gradient_predivide_factor local_rank max_memory num_machines
        num_processes parallelism_config pipeline_parallel_size prescale_gradients
        sequence_parallel_degree sparse_gradients tensor_parallel tensor_parallel_dim tensor_parallel_size
        torch_empty_cache_steps use_cpu world_size""",
    "threads are set by threads.compute and threads.update": "num_threads omp_num_threads",
    "rows are read as they are needed, in an order drawn from train.seed": """curriculum_sampling
        dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
        dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor group_by_length
        ignore_data_skip length_column_name shuffle shuffle_dataset shuffle_merged_datasets streaming
        train_sampling_strategy""",
    "tokenised documents lie in the run's directory and are used again": """dataset_num_proc
        dataset_prepared_path dataset_processes overwrite_cache preprocessing_num_workers
        remove_unused_columns tokenized_path""",
    "rows are padded to round lengths by themselves": "pad_to_multiple_of pad_to_sequence_len",
    "the chat template is the tokenizer's own": """chat_template chat_template_jinja chat_template_path
        conversation default_system_message template""",
    "the tokenizer lies beside the model, with its special tokens": """added_tokens_overrides eos_token
        eot_tokens pad_token resize_token_embeddings_to_32x resize_vocab special_tokens tokenizer
        tokenizer_config tokenizer_name tokenizer_name_or_path tokenizer_type tokenizer_use_fast
        use_fast_tokenizer""",
    "here: data.format (which fields a record has: alpaca and sharegpt, too)": """dataset_kwargs
        dataset_text_field field_input field_instruction field_messages field_output field_system
        label_names message_property_mappings text_column""",
    "the architecture is that of the model's config.json": """_component_ is_falcon_derived_model
        is_llama_derived_model is_mistral_derived_model is_qwen_derived_model model_init_kwargs model_type
        overrides_of_model_config overrides_of_model_kwargs rope_scaling""",
    "remote code is never run": "trust_remote_code",
    "the run ends where train.steps or train.epochs says": """compute_accuracy do_predict do_train
        early_stopping_patience early_stopping_threshold eval_do_concat_batches eval_use_gather_object
        greater_is_better include_for_metrics load_best_model_at_end max_steps_per_epoch
        metric_for_best_model predict_with_generate""",
    "a run trains on cross-entropy: no preferences, no rewards": """dpo_beta kto_desirable_weight
        orpo_alpha pref_beta pref_loss ref_model reward_model rl rl_beta rpo_alpha simpo_gamma stage trl""",
    "here: checkpoint.every, checkpoint.keep and checkpoint.resume": """checkpoint checkpoint_files
        enable_async_checkpointing enable_jit_checkpoint restore_callback_states_from_checkpoint
        save_first_step save_on_each_node save_safetensors""",
    "nothing is uploaded": """hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy
        hub_token push_to_hub push_to_hub_model_id""",
}
"""What is said of names that no single key answers."""


def answer(name: str, own: Mapping[str, str]) -> str | None:
    """What to say to somebody who wrote the key ``name``, as the second half of a sentence; None if unknown.

    Args:
        name: a key without its section.
        own: the run file's keys with their descriptions.
    """
    for key, description in own.items():
        if name in HERE.get(key, "").split():
            return f"here: {key} ({description})" if description else f"here: {key}"
    return next((sentence for sentence, names in SENTENCES.items() if name in names.split()), None)


def find_known(name: str, value: object, own: Mapping[str, str]) -> tuple[str, str] | None:
    """The first key with an answer, in an unknown key and what it holds: its dotted name, and the answer."""
    if (found := answer(name.rpartition(".")[2], own)) is not None:
        return name, found
    if isinstance(value, Mapping):
        for inner, held in value.items():
            if (below := find_known(f"{name}.{inner}", held, own)) is not None:
                return below
    return None
