"""The routes of OpenAI's API, and those that other servers of models have added to it."""

from __future__ import annotations

from ..http.routes import ANY, FORM, JSON, SSE, STREAMED, TEXT, Route, Schema

COHERE_RERANK = "/v2/rerank"  # below the Open Inference Protocol's prefix, and not of it
_RESPONSE: Schema = {
    "type": "object",
    "required": ["id", "object", "created_at", "model", "status", "output"],
    "properties": {
        "object": {"const": "response"},
        "output": {"type": "array", "items": {"type": "object"}},
        **{name: {"type": "string"} for name in ("id", "model", "status")},
    },
}
_LIST: Schema = {
    "type": "object",
    "required": ["object", "data", "has_more"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": ANY}},
}
_ID = r":(?!input_tokens$)[^/]+"  # which is a route of its own
_CONVERSATION = ".openai.response_routes:ConversationBody"
_PAGE = (
    ("after", {"type": "string"}),
    ("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
    ("order", {"enum": ["asc", "desc"]}),
)
_EVENTS = (("stream", {"enum": ["true", "false"]}), ("starting_after", {"type": "integer", "minimum": 0}))
_INFILLED: Schema = {
    "type": "object",
    "required": ["content", "stop"],
    "properties": {"content": {"type": "string"}, "stop": {"type": "boolean"}},
}
# Of the transcripts' routes: limits of the fields that end in _threshold, by the names that `Thresholds` has.
THRESHOLDS = {"logprob": (-100, 0), "compression_ratio": (0, 1_000), "no_speech": (0, 1)}
TRANSCRIPT_FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
TRANSLATION: Schema = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {
            "type": "string",
            "format": "binary",
            "description": "WAV; with soundfile FLAC, MP3 and Ogg, too",
        },
        "model": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"enum": list(TRANSCRIPT_FORMATS)},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "seed": {"type": "integer", "minimum": 0},
        "stream": {"type": "boolean"},
        "condition_on_prev_tokens": {"type": "boolean"},
        **{
            f"{name}_threshold": {
                "anyOf": [{"type": "number", "minimum": low, "maximum": high}, {"const": "none"}]
            }
            for name, (low, high) in THRESHOLDS.items()
        },
        "teneral[priority]": {"enum": ["interactive", "batch"]},
    },
}
TRANSCRIPTION: Schema = {
    **TRANSLATION,
    "properties": {
        **TRANSLATION["properties"],
        "language": {"type": "string", "description": "such as en; without it, the likeliest one"},
        "timestamp_granularities[]": {"type": "array", "items": {"enum": ["segment", "word"]}},
    },
}
_PAIRS = {"text_1": "Which insects fly?", "text_2": ["A dragonfly", "A stone"]}
_DOCUMENTS = {"query": "Which insects fly?", "documents": ["A dragonfly", "A stone"]}

ROUTES = (
    Route(
        "POST", "/v1/chat/completions", ".openai.chat:ChatRoute.post", "generate", "Answer a chat",
        ".openai.schemas:ChatBody", ".openai.responses:ChatCompletion", STREAMED,
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    ),
    Route(
        "POST", "/v1/completions", ".openai.completions:CompletionRoute.post", "generate",
        "Go on from a prompt",
        ".openai.schemas:CompletionBody", ".openai.responses:Completion", STREAMED,
        example={"prompt": "Once upon a time", "max_tokens": 16},
    ),
    Route(
        "POST", "/v1/responses", ".openai.response_routes:ResponsesRoute.post", "generate",
        "Answer items, and keep the answer for later ones",
        ".openai.responses_body:ResponsesBody", _RESPONSE, STREAMED,
        example={"input": "Hello", "max_output_tokens": 16},
    ),
    Route(
        "POST", "/v1/responses/input_tokens", ".openai.response_routes:CountInputTokensRoute.post", "tokens",
        "Count the tokens of items",
        ".openai.responses_body:CountTokensBody", ANY, example={"input": "Hello"},
    ),
    *(
        Route(method, f"/v1/responses/{{id{_ID}}}{path}", f".openai.response_routes:StoredRoutes.{name}", "stored",
              summary, None, answer, STREAMED if query is _EVENTS else (JSON,), query)
        for method, path, name, summary, answer, query in (
            ("GET", "", "get", "A stored response", _RESPONSE, _EVENTS),
            ("DELETE", "", "delete", "Delete a stored response", ANY, ()),
            ("GET", "/input_items", "input_items", "The items that a stored response continues", _LIST, _PAGE),
            ("POST", "/cancel", "cancel", "End a response that is made in the background", _RESPONSE, ()),
        )
    ),
    *(
        Route(method, f"/v1/conversations{path}", f".openai.response_routes:StoredRoutes.{name}", "stored",
              summary, body, answer, query=query, needs_body=name != "create_conversation")
        for method, path, name, summary, body, answer, query in (
            ("POST", "", "create_conversation", "Begin a conversation", _CONVERSATION, ANY, ()),
            ("GET", "/{id}", "get_conversation", "A conversation", None, ANY, ()),
            ("POST", "/{id}", "update_conversation", "Change its metadata", _CONVERSATION, ANY, ()),
            ("DELETE", "/{id}", "delete_conversation", "Delete a conversation", None, ANY, ()),
            ("GET", "/{id}/items", "conversation_items", "Its items", None, _LIST, _PAGE),
            ("POST", "/{id}/items", "add_items", "Add items", ".openai.response_routes:ItemsBody", _LIST, ()),
            ("GET", "/{id}/items/{item}", "get_item", "One of its items", None, ANY, ()),
            ("DELETE", "/{id}/items/{item}", "delete_item", "Delete one of its items", None, ANY, ()),
        )
    ),
    *(
        Route(
            "POST", f"/v1/audio/{name}", f".openai.audio:AudioRoutes.{name}", "generate", summary,
            schema, ".openai.responses:Transcription", (JSON, SSE, TEXT, "text/vtt"), body_media=FORM,
        )
        for name, summary, schema in (
            ("transcriptions", "Transcribe speech", TRANSCRIPTION),
            ("translations", "Translate speech into English", TRANSLATION),
        )
    ),
    Route(
        "POST", "/v1/embeddings", ".openai.embeddings:EmbeddingRoute.post", "encode", "Vectors of texts",
        ".openai.schemas:EmbeddingBody", ".openai.responses:EmbeddingList",
        example={"input": ["Hello", "Good morning"]},
    ),
    *(
        Route(
            "POST", path, ".openai.rerank:ClassifyRoute.post", "encode", "Labels of texts",
            ".openai.rerank:ClassifyBody", ".openai.rerank:Classification",
            example={"input": "Dragonflies are fast."},
        )
        for path in ("/v1/classify", "/classify")
    ),
    *(
        Route(
            "POST", path, ".openai.rerank:ScoreRoute.post", "encode", "Scores of pairs of texts",
            ".openai.rerank:ScoreBody", ".openai.rerank:Scores", example=_PAIRS,
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Route(
            "POST", path, ".openai.rerank:RerankRoute.post", "encode",
            "Documents in the order of their relevance",
            ".openai.rerank:RerankBody", ".openai.rerank:Ranking", example=_DOCUMENTS,
        )
        for path in ("/v1/rerank", COHERE_RERANK, "/rerank")  # Jina's and Cohere's first, Cohere's, vLLM's
    ),
    Route(
        "POST", "/tokenize", ".openai.tokens:TokenRoutes.tokenize", "tokens", "Tokens of a text or a chat",
        ".openai.tokens:TokenizeBody", ".openai.tokens:Tokenized", example={"prompt": "Hello"},
    ),
    Route(
        "POST", "/detokenize", ".openai.tokens:TokenRoutes.detokenize", "tokens", "The text of tokens",
        ".openai.tokens:DetokenizeBody", ".openai.tokens:Detokenized", example={"tokens": [72, 105]},
    ),
    Route(
        "POST", "/apply-template", ".openai.llama_cpp:ServerRoutes.apply_template", "tokens",
        "The prompt that the chat template makes of messages",
        ".openai.tokens:PromptBody", ".openai.llama_cpp:AppliedTemplate",
        example={"messages": [{"role": "user", "content": "Hello"}]},
    ),
    Route(
        "POST", "/completion", ".openai.llama_cpp:PromptedRoute.post", "generate",
        "Go on from a prompt, as llama.cpp has it",
        ".openai.llama_cpp:PromptedBody", _INFILLED, STREAMED,
        example={"prompt": "Once upon a time", "n_predict": 8},
    ),
    Route(
        "POST", "/infill", ".openai.llama_cpp:InfillRoute.post", "generate",
        "Fill in the middle, as llama.cpp has it",
        ".openai.llama_cpp:InfillBody", _INFILLED, STREAMED,
        example={"input_prefix": "def add(a, b):\n    return ", "input_suffix": "\n", "n_predict": 8},
    ),
    Route(
        "GET", "/props", ".openai.llama_cpp:ServerRoutes.props", "models",
        "The model's context and chat template, as llama.cpp has them", None, ANY,
    ),
    Route(
        "GET", "/slots", ".openai.llama_cpp:ServerRoutes.slots", "models",
        "Busy and idle places in a batch, as llama.cpp has them", None, {"type": "array", "items": ANY},
        query=(("fail_on_no_slot", {"enum": ["0", "1"]}),),
    ),
    *(
        Route(
            "GET", path, ".openai.models:ModelRoutes.list", "models", "The model and its adapters",
            None, ".openai.responses:ModelList",
        )
        for path in ("/v1/models", "/models")  # OpenAI's, and llama.cpp's
    ),
    Route(
        "GET", "/v1/models/{id:.+}",  # names may have slashes: org/model
        ".openai.models:ModelRoutes.get", "models", "One of them",
        None, ".openai.responses:Model",
    ),
    Route(
        "POST", "/v1/load_lora_adapter", ".openai.adapters:AdapterRoutes.load", "models",
        "Load an adapter; needs --model-control",
        ".openai.adapters:LoadBody", media=(TEXT,),
    ),
    Route(
        "POST", "/v1/unload_lora_adapter", ".openai.adapters:AdapterRoutes.unload", "models",
        "Unload an adapter; needs --model-control",
        ".openai.adapters:UnloadBody", media=(TEXT,),
    ),
)  # fmt: skip
