"""The configuration of one instance: one frozen value, and the table of its settings. `resolve.py`
makes it from flags, environment and a TOML file.

A setting has one name everywhere: the field `max_queued` is the flag `--max-queued`, the variable
`TENERAL_MAX_QUEUED` and the TOML key `max_queued`. The environment is read by `resolve` alone,
except for the standard variables of AWS, which the S3 source reads like every AWS program.
"""

from __future__ import annotations

from ..loader.device.detect import CPU, choose_device, parse_device
from ..loader.load.options import LoadOptions, Order
from ..loader.sources.base import SourceOptions
from ..loader.sources.open import model_name
from .setting import (
    Settings,
    automatic,
    boolean,
    choice,
    group,
    integer,
    json_object,
    names,
    parse_bytes,
    seconds,
    setting,
    store_address,
    template,
    text,
)

PREFIX = "TENERAL_"
# Of a server's processes without weights and keys: 212 MiB with a small vocabulary, 185 of them the
# server's own, and about 40 more for parsing a large one (docs/reliability.md).
SERVING_BYTES = 256 << 20
READY_S = 0.5  # from a process's start until it can compute
_LOG_LEVELS = ("debug", "info", "warning", "error")


class ServeConfig(Settings):
    """Settings of an instance. Sizes are bytes, times are seconds. Made by `resolve`, which
    validates.
    """

    group("what is served, and where")
    model: str = setting(
        "",
        text,
        "artifact or model directory: a path, a name on the Hub (org/name[@revision][:QUANTISATION]), hf://, s3://, "
        "gs://, az://, http(s)://; may end in @b3:DIGEST",
    )
    name: str | None = setting(
        None,
        text,
        "the model's name for clients (default: org/name of a model on the Hub, else the last part of MODEL)",
        is_common=True,
    )
    host: str = setting(
        "127.0.0.1",
        text,
        "address to listen on (in the image and on a platform 0.0.0.0: all interfaces)",
        is_common=True,
    )
    port: int = setting(
        8080, integer(0, 65535), "port to listen on; 0 takes a free one", metavar="PORT", is_common=True
    )
    health_port: int | None = setting(
        None,
        integer(0, 65535),
        "a second port for health probes, where a platform sends them elsewhere (default: none)",
        metavar="PORT",
    )
    handler: str | None = setting(
        None,
        text,
        "function to serve at /invoke: module:function or file.py:function",
        is_common=True,
    )
    platform: str = setting(
        "auto",
        text,
        "platform adapter: http, cloud-run, kserve, sagemaker, runpod, runpod-queue, lambda; auto detects it",
        metavar="NAME",
    )
    api_key: str | None = setting(
        None,
        text,
        "bearer token that requests must carry; several comma-separated, or @FILE",
        secret=True,
        is_common=True,
    )
    key_limits: str | None = setting(
        None,
        text,
        "what each API key may use: requests_minute=N,tokens_minute=N, and _day; 429 beyond (default: any number)",
        metavar="LIMITS",
    )
    cors_origin: str | None = setting(
        None,
        text,
        "CORS: origins of web pages that may call this server, comma-separated; * is any (default: none)",
        metavar="ORIGIN",
    )
    allowed_hosts: str | None = setting(
        None,
        text,
        "accepted Host headers, comma-separated; * is any (default: private names, where there is no key and the "
        "address is private)",
        metavar="HOST",
    )
    console: bool = setting(True, boolean, "a page at / that shows the start, the KV pool and the load")
    model_control: bool = setting(
        False,
        boolean,
        "let clients unload and load the model, switch to its fine-tunes (/v2/repository), and load adapters",
    )
    group("the store")
    base: str | None = setting(
        None,
        text,
        "the base of a fine-tune that is stored as differences to it, perhaps with …@b3:DIGEST",
        metavar="ARTIFACT",
    )
    endpoint_url: str | None = setting(
        None, text, "address of an S3-compatible store", metavar="URL", is_common=True
    )
    region: str | None = setting(None, text, "region of the bucket")
    profile: str | None = setting(None, text, "AWS profile to take credentials from")
    addressing_style: str = setting(
        "auto", choice("auto", "path", "virtual"), "how a bucket is addressed: auto, path or virtual"
    )
    anonymous: bool = setting(False, boolean, "send unsigned requests")
    requester_pays: bool = setting(False, boolean, "pay for the requests (requester-pays buckets)")
    read_timeout_s: float = setting(
        10.0, seconds(0.1, 600), "silence after which a request has failed", metavar="SECONDS"
    )
    outage_s: float = setting(
        30.0,
        seconds(0, 3600),
        "how long to keep retrying a store that is down; 0: no longer than other errors",
        metavar="SECONDS",
    )
    hedge_after_s: float = setting(
        0.25,
        seconds(0, 600),
        "hedged reads: how far behind the others a read may be before it is sent again; 0: never",
        metavar="SECONDS",
    )
    min_rate_bytes_s: int = setting(
        4096,
        integer(0, 1 << 40),
        "minimum throughput: a slower request has failed; 0: none",
        metavar="BYTES",
    )
    group("the load")
    loader: str = setting(
        "auto",
        choice("auto", "process", "thread"),
        "load weights in a process of its own or in the server's threads; auto: in threads, but for a GPU and "
        "where torch is imported; thread: parse the tokenizer in one, too",
        metavar="WHERE",
    )
    mmap: bool = setting(
        True,
        boolean,
        "memory-map local safetensors instead of copying them (CPU); --no-… copies them, so that files may be "
        "overwritten in place while they are served",
    )
    connections: int = setting(
        32, integer(1, 256), "most connections that fetch at the same time; fewer where these are as fast"
    )
    weights_bytes: int | None = setting(
        None,
        parse_bytes,
        "memory limit for the weights of a mixture of experts: experts used last stay, others are read again "
        "when a token is routed to them (default: all stay)",
        metavar="SIZE",
    )
    staging_bytes: int | None = setting(
        None,
        parse_bytes,
        "staging buffer for bytes in flight (default: 96 MiB, or less where memory is short)",
        metavar="SIZE",
    )
    cache_dir: str | None = setting(
        None,
        text,
        "local cache of verified parts, for the next container on this node",
        metavar="DIR",
        is_common=True,
    )
    cache_bytes: int = setting(20 << 30, parse_bytes, "most that is kept there", metavar="SIZE")
    first_token: str = setting(
        "exact",
        choice("exact", "draft", "sketch"),
        "weights that choose the first tokens during a load: exact, draft or sketch",
        metavar="WEIGHTS",
        is_common=True,
    )
    draft_ahead: bool = setting(
        True,
        boolean,
        "speculate with the draft tier while the exact weights arrive, where there is time for it",
    )
    verify_exact: bool = setting(
        False, boolean, "when all weights are there, compare each tensor with the digest of its original"
    )
    verify_files: bool = setting(
        True, boolean, "compare the Hub's files with the SHA-256 that it states, while they are served"
    )
    group("chats")
    chat_template: str | None = setting(
        None, text, "file with a chat template in place of the model's own", metavar="FILE"
    )
    trust_request_chat_template: bool = setting(
        False, boolean, "let requests bring chat templates of their own"
    )
    tool_parser: str = setting(
        "auto",
        choice(
            *("auto", "hermes", "qwen3_coder", "glm", "llama3", "pythonic", "mistral", "harmony", "deepseek"),
            *("dsml", "kimi", "granite", "gemma", "json", "off"),
        ),
        "format of the model's tool calls (auto: by its chat template)",
        metavar="NAME",
    )
    reasoning_parser: str = setting(
        "auto",
        choice("auto", "off"),
        "separate reasoning from answers (auto: where the chat template has tags for it)",
        metavar="NAME",
    )
    group("the engine")
    max_context: int | None = setting(
        None,
        integer(1, 1 << 24),
        "tokens a sequence may have (default: what the model was made for)",
        is_common=True,
    )
    kv_bytes: int | None = setting(
        None,
        parse_bytes,
        "memory for the KV pool (default: a share of what is free)",
        metavar="SIZE",
        is_common=True,
    )
    kv_dtype: str = setting(
        "model",
        choice("model", "int8"),
        "dtype of the KV cache: the model's, or int8 in half of the memory",
    )
    prefix_cache: bool = setting(
        True, boolean, "prefix cache: reuse keys and values of past requests that begin in the same way"
    )
    look_ahead: int | str = setting(
        "auto",
        automatic(1, 64),
        "speculative tokens a step, proposed from the prompt and the answer so far (n-grams), on backends whose "
        "answers do not change with them: as many as pay (auto), none (off), or up to N",
        metavar="N",
    )
    kv_host_bytes: int | None = setting(
        None,
        parse_bytes,
        "host memory for KV blocks evicted from the pool; of use where the pool is on another device",
        metavar="SIZE",
    )
    kv_disk_bytes: int | None = setting(
        None, parse_bytes, "the same on a local disk: needs --kv-disk-dir", metavar="SIZE"
    )
    kv_disk_dir: str | None = setting(None, text, "folder on a local disk for that", metavar="DIR")
    kv_snapshot: str | None = setting(
        None,
        text,
        "address of a KV snapshot: computed prefixes kept between instances; may end in @b3:DIGEST",
        metavar="ADDRESS",
    )
    kv_snapshot_bytes: int = setting(
        256 << 20, parse_bytes, "most that is read from and left there", metavar="SIZE"
    )
    kv_snapshot_save: bool = setting(
        True,
        boolean,
        "save prefixes that several requests shared to the snapshot at the end; --no-… only reads",
    )
    kv_snapshot_sessions: bool = setting(
        False, boolean, "save sessions to the snapshot, too, so that they can continue on another instance"
    )
    session_kv_bytes: int | None = setting(
        None,
        parse_bytes,
        "largest share of the KV pool for idle sessions (default: half)",
        metavar="SIZE",
    )
    session_idle_s: float = setting(
        900.0, seconds(0, 86_400), "time after which a session keeps it no longer", metavar="SECONDS"
    )
    max_running: int = setting(32, integer(1, 4096), "sequences in a batch (continuous batching)")
    max_queued: int = setting(
        256, integer(0, 1 << 20), "queue length: requests that may wait; beyond, clients get 429"
    )
    max_queued_per_tenant: int | None = setting(
        None, integer(0, 1 << 20), "requests of one tenant that may wait (default: half of --max-queued)"
    )
    max_wait_s: float | None = setting(
        None, seconds(0, 3_600), "longest time in the queue; beyond, clients get 429", metavar="SECONDS"
    )
    embed_delay_s: float = setting(
        0.0,
        seconds(0, 10),
        "batching delay of embeddings: longest wait for others to share a batch; a lone text never waits",
        metavar="SECONDS",
    )
    backend: str = setting(
        "auto",
        choice("auto", "native", "torch", "direct", "transformers"),
        "compute backend (auto: native on a CPU, else torch if it is installed; direct: a GPU without torch, on trial)",
    )
    compute_dtype: str = setting(
        "auto",
        choice("auto", "bfloat16", "float16", "float32"),
        "compute dtype (auto: bf16 for bf16 weights, else fp32; torch: what the CPU is fast in)",
        metavar="DTYPE",
    )
    device: str = setting(
        "auto",
        parse_device,
        "compute device: cpu, cuda or cuda:N (auto: the first GPU, where there is one and CuPy is installed)",
        metavar="DEVICE",
        is_common=True,
    )
    device_percent: int | None = setting(
        None,
        integer(1, 100),
        "most of a GPU's memory that this server takes, for several on one (default: what is free)",
    )
    kernel_dir: str | None = setting(
        None,
        text,
        "folder of GPU kernels compiled ahead of time",
        metavar="DIR",
    )
    threads: int | None = setting(
        None, integer(1, 1024), "threads that compute (default: the cores at hand)", is_common=True
    )
    trim_imports: bool = setting(
        False,
        boolean,
        "skip the parts of torch that only tracing needs (torch.compile, meta tensors): starts 0.2 s sooner",
    )
    group("adapters")
    adapters: str | None = setting(
        None,
        text,
        "address of LoRA adapters, by name: s3://bucket/adapters/{name} (default: none)",
        metavar="ADDRESS",
    )
    adapters_bytes: int = setting(
        1 << 30, parse_bytes, "memory for adapters; the least recently used are unloaded", metavar="SIZE"
    )
    group("ONNX models")
    ort_providers: str | None = setting(
        None,
        names("cpu", "openvino", "cuda", "tensorrt"),
        "ONNX Runtime execution providers in order of preference, comma-separated: cpu, openvino, cuda, tensorrt "
        "(default: cpu)",
        metavar="NAMES",
    )
    ort_batch: int = setting(
        8,
        integer(1, 4096),
        "dynamic batching of ONNX calls: largest batch; 1: none",
    )
    group("standby processes")
    standby: int = setting(
        0,
        integer(0, 256),
        "processes to keep that have imported everything and hold no model",
        metavar="N",
        is_common=True,
    )
    standby_socket: str | None = setting(
        None,
        text,
        "socket of a standby pool: serve from one of its processes, if one is there",
        metavar="PATH",
    )
    group("batch jobs that events start")
    batch_output: str | None = setting(
        None,
        template("account", "bucket", "key", "etag", required="key"),
        "where a job writes whose event names only its input: s3://results/{bucket}/{key}/{etag}.jsonl",
        metavar="ADDRESS",
    )
    batch_answers: str | None = setting(
        None,
        template("queue", "id", required="id"),
        "where the answers to single requests from a queue go: s3://answers/{queue}/{id}.json",
        metavar="ADDRESS",
    )
    batch_audio: str | None = setting(
        None,
        json_object,
        """fields of the requests that jobs make of files of sound: {"response_format": "verbose_json"}""",
        metavar="JSON",
    )
    group("requests and shutdown")
    max_body_bytes: int = setting(8 << 20, parse_bytes, "largest request body", metavar="SIZE")
    image_origins: str | None = setting(None, text, "origins of images in chats; *: any", metavar="ORIGIN")
    responses_bytes: int = setting(
        64 << 20, parse_bytes, "bound of responses and conversations kept; 0: none", metavar="SIZE"
    )
    responses_idle_s: float = setting(
        3600.0, seconds(0, 2_592_000), "time after its last use for which one is kept", metavar="SECONDS"
    )
    responses_store: str | None = setting(
        None, store_address, "where they are kept, for all instances (default: memory)", metavar="ADDRESS"
    )
    request_timeout_s: float = setting(
        600.0, seconds(0.1, 86_400), "longest time for one request", metavar="SECONDS"
    )
    drain_timeout_s: float | None = setting(
        None,
        seconds(0, 3_600),
        "graceful shutdown: time for running requests (default: what the platform allows, else 8 s)",
        metavar="SECONDS",
    )
    lambda_streaming: bool = setting(
        False, boolean, "AWS Lambda response streaming, for function URLs with InvokeMode RESPONSE_STREAM"
    )
    emf: bool = setting(
        False, boolean, "CloudWatch metrics (EMF) of requests and starts, as JSON lines on standard output"
    )
    otel: bool = setting(
        False, boolean, "export OpenTelemetry spans of requests, as the OTEL_* variables say"
    )
    log_format: str = setting("text", choice("text", "json"), "a line as text, or as a JSON object")
    log_level: str = setting("info", choice(*_LOG_LEVELS), "debug, info, warning or error")

    @property
    def chosen_device(self) -> str:
        """The device's name, from `choose_device`. Raises `UsageError` for one that cannot be used."""
        return choose_device(self.device, needs_torch=self.backend != "direct")

    @property
    def source_options(self) -> SourceOptions:
        # Other backends compute with floats and integers of our own layout.
        device = self.chosen_device if self.device == "auto" else self.device
        is_native = self.backend in ("auto", "native") and device == CPU
        return self.options(SourceOptions, max_connections=self.connections, gguf_blocks=is_native)

    @property
    def load_options(self) -> LoadOptions:
        return self.options(
            LoadOptions,
            reserved_bytes=(self.kv_bytes or 0) + (self.kv_host_bytes or 0),
            serving_bytes=SERVING_BYTES,
            order=Order.AUTO if self.draft_ahead else Order.EXACT,
            ready_s=READY_S,
            sends_drafts=self.first_token != "exact",  # noqa: S105 - not that kind of token
            on_demand=True,
        )

    @property
    def max_calls(self) -> int:
        """Sequences, or calls of an encoder or an ONNX model, that run or wait at the same time."""
        return self.max_running + self.max_queued

    @property
    def served_name(self) -> str:
        """The model's name for clients: `name`, or `model_name` of the address."""
        return self.name or model_name(self.model)


# Of every command that reads or writes a store.
STORE_SETTINGS = ("endpoint_url", "region", "profile", "addressing_style", "anonymous", "requester_pays")
SETTINGS = ServeConfig.table
