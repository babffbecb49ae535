"""Every name of vLLM that this folder uses, as a table.

vLLM promises nothing about these names: nearly all of them are private, or inside ``vllm.v1``, or fields of objects
that vLLM hands to the classes of this folder.  An upgrade of vLLM begins here: an engine process checks the table
(compat.py), and the error says which name is missing and what Thaw uses it for.

A test parses the folder's source and fails when it uses a name that the table lacks.
"""

from __future__ import annotations

from typing import Final

from thaw_runtime.engine.vllm.name_entry import Kind
from thaw_runtime.engine.vllm.name_entry import names as _names
from thaw_runtime.engine.vllm.vllm_names_of_checks import CHECKED_WITH, LINEAR, LOADER_UTILS, MODELS, WORKER

WRITTEN_FOR: Final = "0.32.0"

_PARALLEL: Final = "vllm.distributed.parallel_state"
_GROUP: Final = f"{_PARALLEL}:GroupCoordinator"
_KERNELS: Final = "vllm.model_executor.layers.utils"
_EMBEDDING: Final = "vllm.model_executor.layers.vocab_parallel_embedding"
_RUNNER: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_ROWS: Final = "vllm.v1.worker.gpu_input_batch:InputBatch"
_CACHE: Final = "vllm.config.cache:CacheConfig"
_EXECUTOR: Final = "vllm.v1.executor.uniproc_executor:UniProcExecutor"
_CORE: Final = "vllm.v1.engine.core:EngineCore"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_SCHEDULED: Final = "vllm.v1.core.sched.output"
_KV_CORE: Final = "vllm.v1.core"
_KV_MANAGER: Final = f"{_KV_CORE}.kv_cache_manager:KVCacheManager"
_OUTPUTS: Final = "vllm.v1.outputs"
_STRUCTURED: Final = "vllm.v1.structured_output"
_FORM: Final = "hold an answer to a grammar"
_EMBED: Final = "compute embeddings"
_CONTINUE: Final = "continue a request that began elsewhere"

NAMES: Final = (
    *CHECKED_WITH,
    # ── env.py, configuration.py ──
    _names(
        "vllm.envs",
        "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_CONFIGURE_LOGGING VLLM_NO_USAGE_STATS VLLM_PLUGINS VLLM_CPU_KVCACHE_SPACE",
        "set up the environment of an engine process",
    ),
    _names("vllm.envs", "VLLM_PP_LAYER_PARTITION", "give a stage the layers of its plan"),
    _names("vllm.envs", "VLLM_USE_V2_MODEL_RUNNER VLLM_USE_FLASHINFER_SAMPLER", "choose a runner and a sampler"),
    _names("vllm.engine.arg_utils", "EngineArgs", "configure the engine"),
    _names(
        "vllm.engine.arg_utils:EngineArgs",
        "model load_format skip_tokenizer_init enforce_eager trust_remote_code kv_cache_memory_bytes disable_log_stats "
        "worker_cls distributed_executor_backend dtype max_model_len max_num_seqs max_num_batched_tokens "
        "pipeline_parallel_size scheduler_cls async_scheduling block_size enable_prefix_caching enable_chunked_prefill "
        "seed quantization kv_cache_dtype hf_overrides",
        "configure the engine",
        Kind.FIELD,
    ),
    _names("vllm.engine.arg_utils:EngineArgs", "create_engine_config", "configure the engine"),
    _names(MODELS, "ModelRegistry", "import a model's class in this process"),
    _names(
        f"{MODELS}:ModelRegistry",
        "models get_supported_archs register_model",
        "import a model's class in this process",
    ),
    _names(f"{MODELS}.registry", "_LazyRegisteredModel", "find out whether a model's class has been imported"),
    _names(f"{MODELS}.registry:_LazyRegisteredModel", "load_model_cls", "import a model's class in this process"),
    _names("vllm.platforms", "current_platform", "find out whether it runs on a CPU"),
    _names("vllm.platforms:current_platform", "is_cpu", "find out whether it runs on a CPU"),
    _names("vllm.platforms:current_platform", "dist_backend", "set up a process's world of one"),
    _names("vllm.platforms:current_platform", "register_triton_kernel_overrides", "look for kernels once in a zygote"),
    _names("vllm.plugins", "load_general_plugins", "look for plugins once in a zygote"),
    _names("vllm.v1.sample", "logits_processor", "look for plugins once in a zygote"),
    _names("vllm.v1.sample.logits_processor", "_load_logitsprocs_plugins", "look for plugins once in a zygote"),
    _names(
        "vllm.utils",
        "cpu_resource_utils mem_utils numa_utils platform_utils",
        "make vLLM look again at the limits of a container that was claimed",
    ),
    _names("vllm.utils.cpu_resource_utils", "_get_cpu_list", "list the CPU's cores once in a zygote", cpu_only=True),
    _names(
        "vllm.config.vllm:VllmConfig",
        "cache_config model_config parallel_config scheduler_config",
        "plan the memory of a stage",
        Kind.FIELD,
    ),
    _names(
        _CACHE, "kv_cache_memory_bytes num_gpu_blocks_override gpu_memory_utilization", "size the cache", Kind.FIELD
    ),
    _names(_CACHE, "block_size num_gpu_blocks", "check a batch of another stage", Kind.FIELD),
    _names("vllm.config.model:ModelConfig", "dtype quantization max_model_len", "plan a stage's memory", Kind.FIELD),
    _names("vllm.config.model:ModelConfig", "get_vocab_size try_get_generation_config", "know a model's tokens"),
    _names("vllm.config.scheduler:SchedulerConfig", "max_num_batched_tokens", "plan a stage's memory", Kind.FIELD),
    _names("vllm.config.scheduler:SchedulerConfig", "max_num_seqs", "plan the memory of a stage", Kind.FIELD),
    _names("vllm.config.parallel:ParallelConfig", "pipeline_parallel_size", "count a pipeline's batches", Kind.FIELD),
    # ── loader.py, window.py, packing.py ──
    _names("vllm.model_executor.model_loader", "register_model_loader utils", "load weights from a segment"),
    _names("vllm.model_executor.model_loader.base_loader", "BaseModelLoader", "load weights from a segment"),
    _names(
        "vllm.model_executor.model_loader.base_loader:BaseModelLoader",
        "download_model create_model load_weights load_model",
        "load weights from a segment",
    ),
    _names(LOADER_UTILS, "process_weights_after_loading", "pack weights for the kernels"),
    _names(LOADER_UTILS, "record_metadata_for_reloading", "skip the notes for a second set of weights"),
    _names("vllm.utils.torch_utils", "set_default_torch_dtype", "create and fill a model in its own dtype"),
    _names("vllm.utils.torch_utils", "PIN_MEMORY", "make more batches like the runner's own"),
    _names(f"{MODELS}.utils", "PPMissingLayer", "remove modules that a stage never calls"),
    _names(f"{MODELS}.llama:LlamaModel", "start_layer end_layer", "choose the layers that compute", Kind.FIELD),
    _names(
        f"{MODELS}.transformers.base:Base",
        "model pp_group",
        "choose the layers that compute in a model of the Transformers backend",
        Kind.FIELD,
    ),
    _names(
        f"{MODELS}.transformers.base",
        "supports_pp_plan _pp_plan get_decoder",
        "choose the layers that compute in a model of the Transformers backend",
        Kind.FIELD,
    ),
    _names(LINEAR, "UnquantizedLinearMethod", "pack a layer that has arrived"),
    _names(f"{LINEAR}:LinearBase", "quant_method", "pack a layer that has arrived", Kind.FIELD),
    _names(f"{LINEAR}:UnquantizedLinearMethod", "process_weights_after_loading", "pack a layer that has arrived"),
    _names(_KERNELS, "cpu_linear", "multiply by weights that are not packed", Kind.FIELD),
    _names("vllm.model_executor.layers", "utils", "multiply prompts on a CPU"),
    _names(_KERNELS, "dispatch_cpu_unquantized_gemm ops check_cpu_sgl_kernel", "multiply prompts on a CPU"),
    _names(_EMBEDDING, "ParallelLMHead UnquantizedEmbeddingMethod", "leave the input embedding unpacked"),
    _names(f"{_EMBEDDING}:VocabParallelEmbedding", "quant_method", "leave the input embedding unpacked", Kind.FIELD),
    _names(f"{_EMBEDDING}:UnquantizedEmbeddingMethod", "process_weights_after_loading", "pack the output head"),
    # ── worker.py, stage.py ──
    _names("vllm.distributed", "parallel_state", "set up a process's world of one"),
    _names(
        _PARALLEL,
        "init_distributed_environment ensure_model_parallel_initialized get_pp_group",
        "set up a process's world of one",
    ),
    _names(_PARALLEL, "_PP", "put its own group in the place of the pipeline group"),
    _names(
        _GROUP,
        "is_first_rank is_last_rank irecv_tensor_dict isend_tensor_dict destroy",
        "put its own group in the place of the pipeline group",
    ),
    _names(
        _GROUP, "rank_in_group world_size ranks", "put its own group in the place of the pipeline group", Kind.FIELD
    ),
    _names("vllm.v1.worker.cpu_worker", "CPUWorker", "run a worker on a CPU", cpu_only=True),
    _names("vllm.v1.worker.gpu_worker", "Worker", "run a worker on a GPU"),
    _names(WORKER, "init_device get_kv_cache_spec determine_available_memory", "prepare a stage's worker"),
    _names(WORKER, "_maybe_get_memory_pool_context", "allocate the KV cache without touching it"),
    _names(WORKER, "model_runner", "reach the model runner", Kind.FIELD),
    _names(
        "vllm.v1.worker.worker_base:WorkerBase",
        "distributed_init_method local_rank cache_config",
        "set up a process's world of one",
        Kind.FIELD,
    ),
    _names("vllm.utils.cpu_resource_utils", "get_visible_memory_node", "leave memory unbound on a lone node"),
    _names("torch:ops._C", "init_cpu_memory_env", "leave memory unbound on a lone node", cpu_only=True),
    _names(
        "vllm.v1.kv_cache_interface",
        "FullAttentionSpec SlidingWindowSpec",
        "give layers with a sliding window whole contexts in a pipeline",
    ),
    # ── executors.py, continuation.py, persistent_batches.py ──
    _names("vllm.v1.executor.uniproc_executor", "UniProcExecutor", "run a worker in this process"),
    _names(_EXECUTOR, "_init_executor", "prepare its executor"),
    _names(
        _EXECUTOR,
        "supports_pp execute_model sample_tokens collective_rpc",
        "pass a batch between the stages of a pipeline",
    ),
    _names(_EXECUTOR, "driver_worker", "reach the model runner", Kind.FIELD),
    _names("vllm.v1.worker.worker_base:WorkerWrapperBase", "worker", "reach the model runner", Kind.FIELD),
    _names(
        "vllm.v1.executor.abstract:Executor",
        "vllm_config cache_config model_config",
        "prepare its executor",
        Kind.FIELD,
    ),
    _names("vllm.v1.sample.logits_processor", "build_logitsprocs", "make more batches like the runner's own"),
    _names(
        _RUNNER,
        "vllm_config kv_cache_config _init_block_sizes input_batch device is_pooling_model",
        "make more batches like the runner's own",
        Kind.FIELD,
    ),
    _names(_RUNNER, "may_reinitialize_input_batch", "make more batches like the runner's own"),
    _names(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        "_postprocess_tensors",
        "make more batches like the runner's own",
        cpu_only=True,
    ),
    _names(
        _RUNNER,
        "model intermediate_tensors max_num_tokens max_num_reqs dtype",
        "take the tensors of the stage before",
        Kind.FIELD,
    ),
    _names(
        f"{MODELS}.interfaces:SupportsPP",
        "make_empty_intermediate_tensors",
        "take the tensors of the stage before",
        Kind.FIELD,
    ),
    _names(_RUNNER, "requests discard_request_mask", _CONTINUE, Kind.FIELD),
    _names(_ROWS, "req_id_to_index generators sampling_metadata", _CONTINUE, Kind.FIELD),
    _names(_ROWS, "num_reqs req_ids", _CONTINUE),
    _names(_ROWS, "logitsprocs", "make more batches like the runner's own", Kind.FIELD),
    _names(_ROWS, "remove_request", "keep a request's rows in one batch"),
    _names(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "output_token_ids generator block_ids",
        _CONTINUE,
        Kind.FIELD,
    ),
    _names(
        "vllm.v1.sample.metadata:SamplingMetadata", "output_token_ids", "show penalties the whole output", Kind.FIELD
    ),
    _names("vllm.v1.utils:CpuGpuBuffer", "np", _CONTINUE, Kind.FIELD),
    _names("vllm.v1.kv_cache_interface:KVCacheConfig", "kv_cache_groups", "rehearse a batch of a stage", Kind.FIELD),
    _names(f"{MODELS}.interfaces_base:VllmModelForTextGeneration", "compute_logits", "add a test's noise"),
    # ── translation.py, stage.py, open_request.py ──
    _names("vllm", "SamplingParams", "hand a request to the engine"),
    _names(
        "vllm.sampling_params:SamplingParams",
        "temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty stop_token_ids "
        "max_tokens min_tokens logprobs logit_bias detokenize ignore_eos",
        "hand a request to the engine",
        Kind.FIELD,
    ),
    _names("vllm.v1.core.kv_cache_utils", "KVCacheBlockCopy", "send a batch to other stages"),
    _names(
        "vllm.v1.core.kv_cache_utils:KVCacheBlockCopy",
        "src_block_id dst_block_id",
        "send a batch to other stages",
        Kind.FIELD,
    ),
    _names(_SCHEDULED, "CachedRequestData NewRequestData SchedulerOutput", "send a batch to other stages"),
    _names(f"{_SCHEDULED}:SchedulerOutput", "make_empty", "send a batch to other stages"),
    _names(
        f"{_SCHEDULED}:SchedulerOutput",
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens finished_req_ids "
        "kv_cache_block_copies new_block_ids_to_zero",
        "send a batch to other stages",
        Kind.FIELD,
    ),
    _names(
        f"{_SCHEDULED}:NewRequestData",
        "req_id prompt_token_ids mm_features sampling_params pooling_params block_ids num_computed_tokens lora_request",
        "send a batch to other stages",
        Kind.FIELD,
    ),
    _names(
        f"{_SCHEDULED}:CachedRequestData",
        "req_ids resumed_req_ids new_token_ids all_token_ids new_block_ids num_computed_tokens num_output_tokens",
        "send a batch to other stages",
        Kind.FIELD,
    ),
    _names(_OUTPUTS, "EMPTY_MODEL_RUNNER_OUTPUT LogprobsLists ModelRunnerOutput", "take the tokens of the last stage"),
    _names(
        f"{_OUTPUTS}:ModelRunnerOutput",
        "req_ids req_id_to_index sampled_token_ids logprobs",
        "take the tokens of the last stage",
        Kind.FIELD,
    ),
    _names(
        f"{_OUTPUTS}:LogprobsLists",
        "logprob_token_ids logprobs sampled_token_ranks",
        "take the tokens of the last stage",
        Kind.FIELD,
    ),
    _names(f"{_OUTPUTS}:LogprobsTensors", "selected_token_ranks", "rank the tokens of a prompt", Kind.FIELD),
    _names(
        "vllm.v1.engine:EngineCoreOutput",
        "request_id new_token_ids new_logprobs new_prompt_logprobs_tensors finish_reason prefill_stats",
        "read the engine's tokens",
        Kind.FIELD,
    ),
    _names(
        "vllm.v1.metrics.stats:PrefillStats",
        "num_cached_tokens",
        "say how much of a prompt was in the prefix cache",
        Kind.FIELD,
    ),
    _names("vllm.v1.engine:EngineCoreOutputs", "outputs", "read the engine's tokens", Kind.FIELD),
    # ── embeddings.py ──
    _names("vllm", "PoolingParams", _EMBED),
    _names("vllm.pooling_params:PoolingParams", "task dimensions", _EMBED, Kind.FIELD),
    _names("vllm.pooling_params:PoolingParams", "verify", _EMBED),
    _names("vllm.engine.arg_utils:EngineArgs", "runner", _EMBED, Kind.FIELD),
    _names("vllm.config.model:ModelConfig", "runner_type pooler_config", _EMBED, Kind.FIELD),
    _names("vllm.config.model:ModelConfig", "is_matryoshka matryoshka_dimensions embedding_size", _EMBED),
    _names("vllm.config.model:ModelConfig", "attn_type", "plan no KV cache for an encoder"),
    _names("vllm.config.pooler:PoolerConfig", "seq_pooling_type", _EMBED, Kind.FIELD),
    _names("vllm.model_executor.layers.pooler:Pooler", "get_supported_tasks", _EMBED),
    _names(f"{MODELS}.interfaces_base:VllmModelForPooling", "is_pooling_model pooler", _EMBED, Kind.FIELD),
    _names("vllm.v1.engine:EngineCoreOutput", "pooling_output", _EMBED, Kind.FIELD),
    _names(_CORE, "get_supported_tasks", _EMBED),
    # ── engine.py, scheduler.py, own_core.py ──
    _names("vllm.exceptions", "VLLMClientError", "fail a request that vLLM refuses"),
    _names("vllm.v1.engine.core", "EngineCore", "run the engine in this process"),
    _names(
        f"{_CORE}.__init__",
        "log_stats",
        "run the engine in this process",
        Kind.PARAMETER,
    ),
    _names(_CORE, "add_request abort_requests reset_prefix_cache", "run the engine in this process"),
    _names(_CORE, "_initialize_kv_caches", "prepare a stage that has no scheduler"),
    _names("vllm.v1.engine", "core", "build the engine of a later stage"),
    _names("vllm.v1.engine.core", "freeze_gc_heap", "build the engine of a later stage without collecting garbage"),
    _names(
        _CORE,
        "vllm_config model_executor scheduler batch_queue request_block_hasher step_fn",
        "run the engine in this process",
        Kind.FIELD,
    ),
    # ── grammars.py ──
    _names("vllm.sampling_params", "StructuredOutputsParams", _FORM),
    _names("vllm.sampling_params:StructuredOutputsParams", "json_object", _FORM, Kind.FIELD),
    _names("vllm.sampling_params:SamplingParams", "structured_outputs", _FORM, Kind.FIELD),
    _names(f"{_STRUCTURED}.backend_types", "StructuredOutputGrammar", _FORM),
    _names(
        f"{_STRUCTURED}.backend_types:StructuredOutputGrammar",
        "accept_tokens validate_tokens rollback fill_bitmask is_terminated reset",
        _FORM,
    ),
    _names(f"{_STRUCTURED}.utils", "choice_as_grammar grammar_is_likely_lark", _FORM),
    _names(f"{_STRUCTURED}:StructuredOutputManager", "_grammar_bitmask", _FORM, Kind.FIELD),
    _names(f"{_STRUCTURED}.request:StructuredOutputRequest", "grammar", _FORM),
    _names("vllm.v1.request:Request", "structured_output_request", _FORM, Kind.FIELD),
    _names(_CORE, "structured_output_manager", _FORM, Kind.FIELD),
    _names(_SCHEDULED, "GrammarOutput", _FORM),
    _names(f"{_SCHEDULED}:GrammarOutput", "structured_output_request_ids grammar_bitmask", _FORM, Kind.FIELD),
    _names("vllm.v1.request", "Request", "hand a request to the engine"),
    _names(
        "vllm.v1.request:Request.__init__",
        "request_id prompt_token_ids sampling_params pooling_params block_hasher cache_salt",
        "hand a request to the engine",
        Kind.PARAMETER,
    ),
    _names("vllm.v1.request:Request", "num_tokens", "divide requests among batches"),
    _names("vllm.v1.request:Request", "request_id num_computed_tokens", "divide requests among batches", Kind.FIELD),
    _names("vllm.v1.core.sched.scheduler", "Scheduler", "divide requests among batches"),
    _names(_SCHEDULER, "schedule has_requests", "divide requests among batches"),
    _names(
        _SCHEDULER,
        "running waiting max_num_active_reqs max_num_running_reqs vllm_config",
        "divide requests among batches",
        Kind.FIELD,
    ),
    # ── first_stage.py, switch.py, verification.py, block_tables.py, kv_blocks.py ──
    _names("vllm", "__version__", "refuse KV blocks of another vLLM"),
    _names("vllm.v1.core.sched.interface", "PauseState", "hold the requests while a group becomes one worker"),
    _names(
        "vllm.v1.core.sched.interface:PauseState",
        "PAUSED_ALL UNPAUSED",
        "hold the requests while a group becomes one worker",
    ),
    _names(_SCHEDULER, "set_pause_state", "hold the requests while a group becomes one worker"),
    _names(
        _SCHEDULER,
        "use_pp requests kv_cache_manager kv_cache_config",
        "give the requests of a group to one worker",
        Kind.FIELD,
    ),
    _names(_CORE, "step", "run one worker without a queue of batches"),
    _names(
        "vllm.v1.request:Request",
        "output_token_ids all_token_ids num_preemptions",
        "give the requests of a group to one worker",
        Kind.FIELD,
    ),
    _names(
        "vllm.v1.worker.gpu_input_batch:CachedRequestState",
        "num_computed_tokens",
        "give the requests of a group to one worker",
        Kind.FIELD,
    ),
    _names(_KV_MANAGER, "get_blocks get_block_ids evict_blocks", "know which KV blocks the requests have"),
    _names(_KV_MANAGER, "block_pool", "know which KV blocks the prefix cache has", Kind.FIELD),
    _names(
        f"{_KV_CORE}.kv_cache_manager:KVCacheBlocks", "blocks", "know which KV blocks the requests have", Kind.FIELD
    ),
    _names(f"{_KV_CORE}.block_pool:BlockPool", "blocks", "know which KV blocks the prefix cache has", Kind.FIELD),
    _names(
        f"{_KV_CORE}.block_pool:BlockPool",
        "get_new_blocks free_blocks get_num_free_blocks touch",
        "compute a batch in KV blocks that no request has",
    ),
    _names(f"{_KV_CORE}.kv_cache_utils:KVCacheBlock", "block_hash", "know which KV blocks the prefix cache has"),
    _names(
        f"{_KV_CORE}.kv_cache_utils:KVCacheBlock",
        "block_id is_null",
        "know which KV blocks the requests have",
        Kind.FIELD,
    ),
    _names(_RUNNER, "compilation_config", "read and write KV blocks", Kind.FIELD),
    _names(
        "vllm.config.compilation:CompilationConfig", "static_forward_context", "read and write KV blocks", Kind.FIELD
    ),
    _names(
        "vllm.v1.kv_cache_interface:KVCacheGroupSpec",
        "layer_names kv_cache_spec",
        "read and write KV blocks",
        Kind.FIELD,
    ),
    _names(
        "vllm.model_executor.layers.attention.attention:Attention", "kv_cache", "read and write KV blocks", Kind.FIELD
    ),
    _names(
        "vllm.v1.attention.backends.cpu_attn", "isa", "refuse KV blocks of other kernels", Kind.FIELD, cpu_only=True
    ),
    _names(f"{_OUTPUTS}:ModelRunnerOutput", "prompt_logprobs_dict", "verify a whole worker", Kind.FIELD),
    _names("vllm.sampling_params:SamplingParams", "prompt_logprobs", "verify a whole worker", Kind.FIELD),
)
