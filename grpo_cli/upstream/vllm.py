"""Internal names of vLLM. Does not import it."""

VERSION = "0.31.0"

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
DEVELOPMENT_ENDPOINTS = "VLLM_SERVER_DEV_MODE"
"""Environment variable that switches on `COLLECTIVE_RPC` and `SERVER_INFO`."""
COLLECTIVE_RPC = "/collective_rpc"
SERVER_INFO = "/server_info"
FINISH_UPDATE = "/finish_weight_update"
"""Processes the weights after the last one, such as packing them in FP8."""
RESET_ENCODER_CACHE = "/reset_encoder_cache"
"""Drops what the vision part has made of images, which its new weights do not."""
RELOAD_WEIGHTS = "reload_weights"
"""Method of the workers; takes `weights_path` or `weights_iterator`."""
GENERATE = "/inference/v1/generate"
"""Samples from tokens and images; a server has it with `--enable-scale-out`."""
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ADAPTER_ENDPOINTS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable that switches on both."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank`. Source: vLLM 0.31, `MaxLoRARanks`."""

_NCCL = "vllm.distributed.device_communicators"

METHODS = {
    f"vllm.v1.worker.gpu_worker.Worker.{RELOAD_WEIGHTS}": "args, kwargs",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.reload_weights": (
        "weights_iterator, weights_path, is_checkpoint_format"
    ),
    "vllm.entrypoints.llm.LLM.collective_rpc": "method, timeout, args, kwargs",
    "vllm.v1.engine.llm_engine.LLMEngine.add_lora": "lora_request",
    "vllm.v1.engine.llm_engine.LLMEngine.reset_encoder_cache": "",
    f"{_NCCL}.pynccl_wrapper.NCCLLibrary.ncclCommAbort": "comm",
}
NAMES = {"vllm.lora.request": "LoRARequest"}
ATTRIBUTES = {f"{_NCCL}.pynccl.PyNcclCommunicator": "nccl comm"}
LITERALS = {
    "vllm.entrypoints.serve.dev.rpc.api_router": (COLLECTIVE_RPC,),
    "vllm.entrypoints.serve.dev.server_info.api_router": (SERVER_INFO,),
    "vllm.entrypoints.serve.dev.cache.api_router": (RESET_ENCODER_CACHE,),
    "vllm.entrypoints.serve.lora.api_router": (LOAD_ADAPTER, UNLOAD_ADAPTER),
    "vllm.entrypoints.scale_out.token_in_token_out.api_router": (GENERATE,),
    "vllm.envs": (DEVELOPMENT_ENDPOINTS, ADAPTER_ENDPOINTS),
}
"""Strings in the source of a module."""
