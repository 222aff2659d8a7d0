"""What serving engines, drivers and kernels say when a server fails, as data: words → code → class, reaction, cure.

`RULES` are tried from the top on each line, so the specific stand above the general; the first that fits reads the line. A form
is matched at the *front* of what was said, behind time stamps, ranks and names of exceptions, where a program puts its own words;
the same words further in are somebody else's: an argument, a prompt, a quotation. `tests/recorded/engine-logs` has a log of each kind
with its right reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final


class Cause(StrEnum):
    """What kind of thing went wrong; the last three are no failure, `UNKNOWN` is never a guess."""

    CONFIG_ERROR = "config_error"
    RESOURCE_BUSY = "resource_busy"
    HOST_FAULT = "host_fault"
    TRANSIENT = "transient"
    ENGINE_FAULT = "engine_fault"
    SECONDARY = "secondary"
    READY = "ready"
    LOADING = "loading"
    DRAINING = "draining"
    UNKNOWN = "unknown"


class Reaction(StrEnum):
    """What to do about it."""

    ROLLBACK = "rollback"
    RELEASE_RETRY = "release_retry"
    PAGE = "page"
    LOOK_AT_OTHER_RANKS = "look_at_other_ranks"
    WAIT = "wait"
    ACCEPT = "accept"


class Rank(IntEnum):
    """Whose word counts. A line of a higher rank decides over an earlier one of a lower rank."""

    SECONDARY = 1
    GENERAL = 2
    SPECIFIC = 3
    KERNEL = 4


REACTIONS: Final[Mapping[Cause, Reaction]] = {
    Cause.CONFIG_ERROR: Reaction.ROLLBACK,
    Cause.RESOURCE_BUSY: Reaction.RELEASE_RETRY,
    Cause.HOST_FAULT: Reaction.PAGE,
    Cause.TRANSIENT: Reaction.RELEASE_RETRY,
    Cause.ENGINE_FAULT: Reaction.ROLLBACK,
    Cause.SECONDARY: Reaction.LOOK_AT_OTHER_RANKS,
    Cause.READY: Reaction.ACCEPT,
    Cause.LOADING: Reaction.WAIT,
    Cause.DRAINING: Reaction.WAIT,
    Cause.UNKNOWN: Reaction.ROLLBACK,
}


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a code means, and what cures it: in the spec, or on the host."""

    cause: Cause
    why: str
    change: str
    reaction: Reaction | None = None
    also_page: bool = False


C = Cause
CODES: Final[Mapping[str, Meaning]] = {
    # -- the command line
    "unknown_flag": Meaning(C.CONFIG_ERROR, "the engine does not know an argument", "take the argument out of `args`, or write it as this version does: `reconcile validate` checks it with `engine.version` written"),
    "removed_flag": Meaning(C.CONFIG_ERROR, "the installed version no longer has this flag", "write the flag that took its place, and `engine.version` so that `reconcile validate` checks against it"),
    "ambiguous_flag": Meaning(C.CONFIG_ERROR, "the argument is the beginning of several flags", "write the full name of the flag in `args`"),
    "bad_flag_value": Meaning(C.CONFIG_ERROR, "the engine does not take this value for the flag", "write one of the values that the message names"),
    "spec_combination": Meaning(C.CONFIG_ERROR, "the engine refuses this combination of speculative settings", "change `speculative` (or the flag that the message names)"),
    "tp_does_not_divide": Meaning(C.CONFIG_ERROR, "the model's attention heads do not divide by the tensor-parallel size", "choose a `tp_size` that divides the number of heads in the message"),
    "ep_does_not_divide": Meaning(C.CONFIG_ERROR, "the model's experts do not divide by the expert-parallel size", "choose `ep_size` or the number of redundant experts so that it divides"),
    "context_above_model": Meaning(C.CONFIG_ERROR, "the context asked for is longer than the model's own", "lower the context length in `args` to what the model's config.json allows"),
    # -- memory
    "oom_weights": Meaning(C.CONFIG_ERROR, "the weights do not fit into the cards, which were free", "use more GPUs (`tp_size`), a smaller quantization, or another model"),
    "oom_unclear": Meaning(C.UNKNOWN, "the GPU's memory ran out, and nothing in this log shows whose it was", "see who is on the cards (`reconcile doctor HOST`, nvidia-smi) and give the whole log from the server's start: if others hold the memory, have it released; if nobody does, the spec asks for too much", also_page=True),
    "oom_draft": Meaning(C.CONFIG_ERROR, "the draft model no longer fits beside the main one", "lower the memory fraction in `args`, or leave `speculative` out"),
    "oom_after_weights": Meaning(C.CONFIG_ERROR, "the weights fitted, what comes after them did not", "lower the memory fraction, the batch or the context in `args`"),
    "oom_graph_capture": Meaning(C.CONFIG_ERROR, "no memory was left for capturing graphs", "lower the memory fraction (mem-fraction-static, gpu-memory-utilization), or capture for smaller batches"),
    "oom_under_load": Meaning(C.CONFIG_ERROR, "memory ran out while serving", "lower the memory fraction or the number of concurrent requests, and gate at that concurrency"),
    "kv_pool_too_small": Meaning(C.CONFIG_ERROR, "after the weights nothing is left for the KV cache within the memory fraction", "raise the memory fraction, use more GPUs, or leave the draft model out; there may be no fraction that fits"),
    "context_exceeds_kv": Meaning(C.CONFIG_ERROR, "one request of full length does not fit into the KV cache", "lower the context length to what the message says, or raise the memory fraction"),
    "utilization_above_baseline": Meaning(C.CONFIG_ERROR, "the fraction asks for more than an idle card has free; no release can cure it", "lower gpu-memory-utilization a little"),
    "gpu_memory_held": Meaning(C.RESOURCE_BUSY, "somebody else holds the GPU's memory", "find the holder (`reconcile release HOST`, nvidia-smi), prove the release, then try once more"),
    "orphan_workers": Meaning(C.RESOURCE_BUSY, "processes of an earlier run live on with the memory", "end them by their control group, prove the release, then try once more"),
    "release_unverified": Meaning(C.RESOURCE_BUSY, "the process is gone and the driver is still reclaiming its memory", "wait for the memory, not for the pid, before the next start"),
    "host_memory_limit": Meaning(C.CONFIG_ERROR, "the host's memory (or the unit's limit) ran out and the kernel killed the engine", "lower what the engine keeps in host memory, or raise the limit of the unit or container"),
    "draft_memory_check": Meaning(C.ENGINE_FAULT, "the engine takes its own draft model's memory for a foreign process", "use another engine version, or leave `speculative` out; nothing foreign is there to be ended"),
    # -- ports, ranks, shared memory
    "port_in_use": Meaning(C.RESOURCE_BUSY, "the port is taken", "find who listens there (`ss -ltnp`), end it if it is a left-over, then try once more"),
    "nccl_init": Meaning(C.HOST_FAULT, "the GPUs' communication could not be set up, and the log does not say why", "look at /dev/shm, the network interface and the driver; NCCL_DEBUG=INFO in `env` makes it say more"),
    "shm_too_small": Meaning(C.CONFIG_ERROR, "the container's /dev/shm is too small", "give the container ipc=host or a larger shared memory"),
    "shm_not_shared": Meaning(C.CONFIG_ERROR, "the ranks do not see the same /dev/shm", "run all ranks in one IPC namespace (ipc=host)"),
    "rendezvous_timeout": Meaning(C.TRANSIENT, "another rank was not up or not reachable in time", "stop every rank, then start all once more, rank 0 first"),
    "peer_rank_failed": Meaning(C.SECONDARY, "another rank failed; this one only noticed", "read the logs of the other ranks for the earliest error"),
    "collective_timeout": Meaning(C.SECONDARY, "this rank waited for a peer that stood still", "read the logs of the other ranks, and the kernel's, for the earliest error"),
    # -- host, driver, cards
    "driver_library_mismatch": Meaning(C.HOST_FAULT, "the NVIDIA library and the loaded kernel module differ", "reload the module or reboot the host; nothing can start there before"),
    "driver_unsupported": Meaning(C.HOST_FAULT, "driver and CUDA do not go together", "update the host's driver, or use an engine build for this driver"),
    "fabric_not_ready": Meaning(C.HOST_FAULT, "the NVSwitch fabric is not initialised", "check nvidia-fabricmanager; right after a boot, wait a minute once"),
    "gpu_ecc": Meaning(C.HOST_FAULT, "a card has a memory fault", "take the card out of service; another revision on the same card is no cure"),
    "gpu_lost": Meaning(C.HOST_FAULT, "a card stopped answering", "reset the card or reboot the host, then look at its health"),
    "gpu_reset_failed": Meaning(C.HOST_FAULT, "the card hung and its reset failed", "reboot the host; give the engine more time to stop"),
    "process_unkillable": Meaning(C.HOST_FAULT, "a process is stuck in the driver and cannot be killed", "reboot the host; no number of retries frees the card"),
    "restart_loop": Meaning(C.HOST_FAULT, "the same failing start was repeated, each leaving memory behind", "turn the restarts off, free the memory, then look at the cause of the first failure"),
    "disk_full": Meaning(C.HOST_FAULT, "the disk is full", "free space on the host; what was there before still runs", Reaction.ROLLBACK, also_page=True),
    # -- the build
    "no_gpu_given": Meaning(C.CONFIG_ERROR, "the engine sees no GPU", "give the container its devices; on bare metal check the driver first"),
    "arch_not_built": Meaning(C.CONFIG_ERROR, "this build has no code for the card's architecture", "use an engine build (image or wheel) for this card"),
    "toolchain_above_driver": Meaning(C.CONFIG_ERROR, "this build's CUDA is newer than what the driver can compile", "use an older image, or have the driver updated"),
    "broken_install": Meaning(C.CONFIG_ERROR, "the engine's installation lacks a library or tool that it needs", "repair the environment (matching CUDA packages), or use another image"),
    "illegal_memory_access": Meaning(C.ENGINE_FAULT, "the engine's kernels crashed on a valid spec", "go back to the engine version that worked, or change the speculative settings"),
    "launch_failure": Meaning(C.ENGINE_FAULT, "a kernel of the engine crashed; no sign of a broken card was given", "go back to the version that worked; if it comes again, look at the card"),
    "parser_regression": Meaning(C.ENGINE_FAULT, "this build refuses a parser that fits the model", "use another engine version, or leave the reasoning parser out"),
    "hang": Meaning(C.ENGINE_FAULT, "the server stands still: up, and no token leaves it", "go back to what worked; with speculation, try other settings"),
    "acceptance_zero": Meaning(C.ENGINE_FAULT, "every draft is rejected: the speculation is broken, and probably the text", "go back to what worked, or leave `speculative` out"),
    "watchdog_timeout": Meaning(C.CONFIG_ERROR, "a long compilation or load met the engine's watchdog", "raise the watchdog timeout in `args`, or turn the compilation off"),
    "ready_timeout": Meaning(C.TRANSIENT, "the front end gave up on an engine that was still starting", "release what it left behind, raise VLLM_ENGINE_READY_TIMEOUT_S in `env`, then try once more"),
    "warmup_failed": Meaning(C.CONFIG_ERROR, "the engine's own first request failed", "keep local calls off the proxy: no_proxy=127.0.0.1,localhost in `env`"),
    # -- the model
    "model_access_denied": Meaning(C.CONFIG_ERROR, "the hub refuses this token for this model", "give a token that may read the model under `secrets`"),
    "model_path_missing": Meaning(C.CONFIG_ERROR, "the model's path does not exist where the engine runs", "write a path that exists there, or mount it into the container"),
    "weights_corrupt": Meaning(C.CONFIG_ERROR, "a weight file is short or damaged", "download the file again and compare its size or hash"),
    "model_unsupported": Meaning(C.CONFIG_ERROR, "this engine version does not know the model's architecture", "use an engine version that knows it"),
    "trust_remote_code": Meaning(C.CONFIG_ERROR, "the model brings code of its own to run", "read that code; a person may then allow it with trust-remote-code in `args`"),
    "chat_template_missing": Meaning(C.CONFIG_ERROR, "the model has no chat template, so every chat is refused", "give chat-template in `args`"),
    # -- no failure
    "ready": Meaning(C.READY, "the server is up", "nothing"),
    "loading": Meaning(C.LOADING, "the server is still loading", "wait until the ready timeout"),
    "draining": Meaning(C.DRAINING, "the server waits for its last requests", "wait until the stop timeout"),
    "unknown": Meaning(C.UNKNOWN, "nothing in this log is known to be a cause", "read the lines above the end; nothing is retried", also_page=True),
}  # fmt: skip

_LABEL: Final = r"(?:[A-Z][\w ./()-]{0,60}: )?"
_PROGRAM: Final = r"(?:[\w./-]+(?: [\w-]+)?: )?"
_LABELS: Final = r"(?:[\w ./-]{1,60}: ){0,5}"
_PROSE: Final = r"[^'\"`]{0,200}?"
_CUDA: Final = r"(?:CUDA|HIP) (?:error|failure)(?: \d+)?: "


@dataclass(frozen=True, slots=True)
class Rule:
    """A form at the front of what was said.

    `loud`: only where the line calls itself an error; `named`: only behind the name of an exception; `calm`: in an INFO line too;
    `kernel`: in the kernel's log, and only there.
    """

    form: re.Pattern[str]
    code: str
    rank: Rank
    loud: bool
    named: bool
    calm: bool
    kernel: bool


def _rule(
    code: str,
    form: str,
    rank: Rank = Rank.SPECIFIC,
    *,
    loud: bool = False,
    named: bool = False,
    calm: bool = False,
    kernel: bool = False,
) -> Rule:
    return Rule(re.compile(form), code, rank, loud, named, calm, kernel)


RULES: Final = (
    # -- the command line (argparse, and llama.cpp's own parser)
    _rule("unknown_flag", rf"{_PROGRAM}error: unrecognized arguments: \S"),
    _rule("ambiguous_flag", rf"{_PROGRAM}error: ambiguous option: \S+ could match"),
    _rule("bad_flag_value", rf"{_PROGRAM}error: argument \S+: (?:invalid|expected|not allowed|ignored explicit)"),
    _rule("bad_flag_value", rf"{_PROGRAM}error: the following arguments are required: "),
    _rule("unknown_flag", r"error: (?:invalid|unknown) argument: -"),
    _rule("bad_flag_value", r"error while handling argument \"-"),
    # -- what can be computed from the spec
    _rule("tp_does_not_divide", r"Total number of attention heads \(\d+\) must be divisible by (?:the )?tensor parallel size"),
    _rule("tp_does_not_divide", r"(?:num_heads|num_attention_heads|tp_size|tensor_parallel_size)\b.{0,80}\b(?:must be divisible by|is not divisible by|not divisible)", loud=True),
    _rule("ep_does_not_divide", r"n_physical_experts ?= ?\d+ must be divisible by ep_size"),
    _rule("ep_does_not_divide", r"(?:Number of |num_)experts\b.{0,60}\bdivisible by\b.{0,40}\b(?:ep|expert)", loud=True),
    _rule("context_above_model", r"User-specified (?:max_model_len|context_length) \(\d+\) is greater than the derived", loud=True),
    _rule("context_exceeds_kv", r"To serve at least one request with the models?'s max(?:imum)? seq"),
    _rule("spec_combination", r"Speculative decoding for \S+ is not compatible with "),
    _rule("spec_combination", r"speculative_draft_tensor_parallel_size ?= ?\d+ cannot be other value than"),
    _rule("spec_combination", r"Expected both speculative_model and num_speculative_tokens to be provided"),
    _rule("spec_combination", r"num_speculative_tokens was provided but without speculative model"),
    _rule("spec_combination", r"num_speculative_tokens:? ?\S* must be divisible by ", loud=True),
    _rule("spec_combination", r"speculative_eagle_topk ?(?:>|=|\().{0,120}\b(?:page_size|page size|backend|only support|not support)", loud=True),
    _rule("spec_combination", rf"{_PROSE}\bspeculative (?:decoding|algorithm|method)\b.{{0,80}}\b(?:not support|not compatible|incompatible|only support|cannot be used)", Rank.GENERAL, loud=True),
    # -- driver, fabric, cards: what the kernel says
    _rule("gpu_reset_failed", r"amdgpu .*?ring \S+ timeout", Rank.KERNEL, kernel=True),
    _rule("gpu_reset_failed", r"amdgpu .*?(?:GPU Recovery Failed|GPU reset\S* failed)", Rank.KERNEL, kernel=True),
    _rule("gpu_lost", r"amdgpu .*?device lost from bus", Rank.KERNEL, kernel=True),
    _rule("driver_library_mismatch", r"NVRM: RM has detected an NVML/RM version mismatch", Rank.KERNEL, kernel=True),
    _rule("driver_library_mismatch", r"NVRM: API mismatch: ", kernel=True),
    # -- and what the engine or runtime says of them
    _rule("driver_library_mismatch", rf"{_LABELS}[Dd]river/library version mismatch"),
    _rule("driver_library_mismatch", r"Failed to initialize NVML: ", loud=True),
    _rule("driver_unsupported", rf"{_PROSE}\bError 80[34]: (?:system has unsupported display driver|forward compatibility was attempted)"),
    _rule("driver_unsupported", rf"(?:{_CUDA})?(?:system has unsupported display driver / cuda driver combination|CUDA driver version is insufficient for CUDA runtime version)"),
    _rule("driver_unsupported", r"The NVIDIA driver on your system is too old", loud=True),
    _rule("fabric_not_ready", rf"{_PROSE}\bError 802: system not yet initialized"),
    _rule("fabric_not_ready", rf"(?:{_CUDA})?system not yet initialized"),
    _rule("gpu_ecc", rf"{_LABEL}(?:{_CUDA})uncorrectable ECC error encountered"),
    _rule("gpu_lost", rf"{_LABEL}(?:{_CUDA})?(?:GPU is lost|GPU has fallen off the bus|the GPU is lost)"),
    _rule("process_unkillable", r"probe: kernel stack of \d+: .*\buvm_spin_loop\b", calm=True),
    _rule("process_unkillable", r"(?:\[<0>\] )?uvm_spin_loop\+", calm=True),
    _rule("process_unkillable", r"\S+: Processes still around after final SIGKILL", Rank.GENERAL),
    _rule("no_gpu_given", r"Failed to infer device type", loud=True),
    _rule("no_gpu_given", r"No (?:CUDA|HIP) GPUs are available", loud=True),
    _rule("no_gpu_given", rf"{_LABEL}(?:{_CUDA})no CUDA-capable device is detected"),
    _rule("arch_not_built", rf"{_LABEL}(?:{_CUDA})(?:no kernel image is available for execution on the device|device kernel image is invalid)"),
    _rule("toolchain_above_driver", rf"{_LABEL}(?:{_CUDA})the provided PTX was compiled with an unsupported toolchain"),
    _rule("toolchain_above_driver", rf"{_PROSE}\bcudaErrorUnsupportedPtxVersion\b", loud=True),
    _rule("illegal_memory_access", rf"{_LABEL}(?:{_CUDA})an illegal memory access was encountered"),
    _rule("launch_failure", rf"{_LABEL}(?:{_CUDA})unspecified launch failure"),
    # -- memory
    _rule("gpu_memory_held", r"Free memory on device (?:cuda:\d+ )?\([\d.]+/[\d.]+ GiB\) on startup is less than desired GPU memory utilization"),
    _rule("gpu_memory_held", r"The memory capacity is unbalanced\. Some GPUs may be occupied by other processes"),
    _rule("oom_graph_capture", r"Capture (?:cuda|CUDA|target verify CUDA|decode CUDA) ?graphs? failed: .{0,40}out of memory"),
    _rule("oom_weights", rf"{_LABEL}(?:CUDA|HIP) out of memory\.(?: |$)"),
    _rule("oom_weights", rf"{_LABEL}(?:{_CUDA})out of memory\b"),
    _rule("oom_weights", r"ggml_backend_cuda_buffer_type_alloc_buffer: allocating [\d.]+ MiB on device \d+: cudaMalloc failed: out of memory"),
    _rule("oom_weights", r"allocating [\d.]+ MiB on device \d+: cudaMalloc failed: out of memory"),
    _rule("kv_pool_too_small", r"max_total_tokens=\d+ is larger than the profiled value -\d+"),
    _rule("kv_pool_too_small", r"Not enough memory\. Please try (?:to increase|increasing) --mem-fraction-static"),
    _rule("kv_pool_too_small", r"No available memory for the cache blocks"),
    _rule("host_memory_limit", r"Rank \d+ scheduler died during initialization \(exit code: -9\)", Rank.GENERAL),
    _rule("host_memory_limit", r"Rank \d+ scheduler is dead\. Please check if there are relevant logs", Rank.GENERAL),
    _rule("release_unverified", r"Schedulers still alive \d+ ?s after \S+, killing them before they released", calm=True),
    # -- ports, ranks, shared memory
    _rule("port_in_use", r"\[Errno 98\] error while attempting to bind on address "),
    _rule("port_in_use", r"(?:RuntimeError: )?Failed to bind socket to "),
    _rule("port_in_use", r"The server socket has failed to (?:listen|bind)\b.*\bEADDRINUSE\b"),
    _rule("port_in_use", r"couldn'?t bind (?:to )?(?:HTTP )?server socket", loud=False),
    _rule("port_in_use", r"\[Errno 98\] (?:address|Address) already in use", Rank.GENERAL, loud=True),
    _rule("port_in_use", r"[Pp]ort \d+ is (?:already|not available|in use|occupied)\b", Rank.GENERAL, loud=True),
    _rule("shm_too_small", r"Error while creating shared memory segment /dev/shm/nccl-"),
    _rule("shm_not_shared", r"Error while attaching to shared memory segment /dev/shm/nccl-"),
    _rule("peer_rank_failed", r"TP rank \d+ could finish the model loading, but there are other ranks that didn't", Rank.SECONDARY),
    _rule("peer_rank_failed", r"(?:Capture cuda graph failed: )?\[\S*gloo/transport/tcp/\S+\] (?:Connection closed by peer|Connection reset by peer|Read error)", Rank.SECONDARY),
    _rule("peer_rank_failed", r"NCCL error: remote process exited or there was a network error", Rank.SECONDARY),
    _rule("peer_rank_failed", rf"{_PROSE}\bncclRemoteError\b", Rank.SECONDARY, loud=True),
    _rule("collective_timeout", r"(?:\[Rank \d+\] )?Watchdog caught collective operation timeout: WorkNCCL\(", Rank.SECONDARY),
    _rule("nccl_init", r"NCCL error: (?:unhandled|internal|invalid usage)", Rank.GENERAL),
    _rule("nccl_init", r"NCCL error in: \S+, unhandled", Rank.GENERAL),
    _rule("rendezvous_timeout", r"The client socket has timed out after \d+ ?ms while trying to connect to", named=True),
    _rule("rendezvous_timeout", r"The client socket has timed out after \d+ ?ms while trying to connect to", Rank.GENERAL, loud=True),
    # -- the model
    _rule("model_access_denied", r"You are trying to access a gated repo\."),
    _rule("model_access_denied", r"Cannot access gated repo for url ", Rank.GENERAL),
    _rule("model_access_denied", r"401 Client Error[.:]", Rank.GENERAL),
    _rule("model_path_missing", r"Repo id must be in the form 'repo_name' or 'namespace/repo_name'"),
    _rule("model_path_missing", r"Incorrect path_or_model_id: ", loud=True),
    _rule("model_path_missing", r"(?:gguf_init_from_file|llama_model_load): (?:failed to open GGUF file|error loading model: llama_model_loader: failed to load)", loud=False),
    _rule("weights_corrupt", r"Error while deserializing header: (?:MetadataIncompleteBuffer|InvalidHeader\w*|HeaderToo\w*)"),
    _rule("weights_corrupt", rf"{_PROSE}\btensor '[^']{{1,200}}' data is not within the file bounds, model is corrupted"),
    _rule("model_unsupported", r"The checkpoint you are trying to load has model type .{1,80} but Transformers does not recognize this architecture"),
    _rule("model_unsupported", r"Model architectures? \[.{1,200}\] (?:are|is) not supported(?: for now)?", loud=True),
    _rule("model_unsupported", rf"{_PROSE}\bunknown model architecture: '", loud=False),
    _rule("trust_remote_code", r"(?:Loading )?\S+ requires you to execute the (?:configuration|model\w*) file in that repo", loud=True),
    _rule("trust_remote_code", r"The repository .{1,200} contains custom code which must be executed", loud=True),
    _rule("chat_template_missing", r"As of transformers v[\d.]+, default chat template is no longer allowed", loud=True),
    # -- disk, and the build
    _rule("disk_full", r"Not enough free disk space to download the file"),
    _rule("disk_full", r"\[Errno 28\] No space left on device", loud=True),
    _rule("broken_install", r"\[sgl_kernel\] CRITICAL: Could not load any common_ops library"),
    _rule("broken_install", r"\S+: fatal error: \S+\.h(?:pp)?: No such file or directory"),
    _rule("broken_install", rf"{_PROSE}\bundefined symbol: \w", loud=True),
    _rule("broken_install", r"lib[\w.+-]+\.so[\d.]*: cannot open shared object file", Rank.GENERAL, loud=True),
    _rule("parser_regression", r"think_(?:start|end)_token .{1,80} must encode to exactly one token"),
    # -- after loading
    _rule("warmup_failed", r"res=<Response \[\d+\]>", loud=True),
    _rule("ready_timeout", r"Timed out waiting for engine core processes to start", loud=True),
    _rule("hang", r"Health check failed\. Server couldn't get a response from detokenizer"),
    _rule("watchdog_timeout", r"(?:Scheduler w|W)atchdog timeout \(self\.watchdog_timeout=", Rank.GENERAL),
)  # fmt: skip
"""Tried from the top."""
