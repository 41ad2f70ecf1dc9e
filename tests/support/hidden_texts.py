"""Secrets as they are typed, which no record may have, and ordinary values of options, which must be taken."""

KEY = "aB3dE5gH7jK9mN1pQ3rS5tU7vW9xY1zA3bC5"  # drawn by nobody: digits stand beside letters
MARKS = ("hunter2", "x1y2", "FAULT9f8e", KEY[:12], "0123456789ab", "dXNlcjpw")  # one is in each secret that can be read
SECRET_NAMES = """
    API_KEYS TOKEN_V2 SECRET_KEY_BASE OPENAI_KEY_1 PASSWORD_HASH MY_PAT COOKIE auth_header SLACK_WEBHOOK HF_TOKEN
    hf_token HUGGING_FACE_HUB_TOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID PASSWORD db_password X_API_KEY
    CREDENTIALS apiKey APIKEYS SLACK_WEBHOOK_URL GITHUB_PAT SESSION_COOKIES ACCESS_TOKENS refresh_tokens
    PRIVATE_KEYS OPENAI_API_KEY_PROD API_KEY_HASH TOKEN_OLD client_secret CLIENT_SECRETS PASSPHRASE_2 BASIC_AUTH
    OAUTH_CODE ID_JWT passwd wandbApiKey WANDB_API_KEY REGISTRY_PW authHeader oauth2Token
""".split()  # noqa: SIM905
SECRET_VALUES = [
    f"nvapi-{KEY}", "nvapi-abcdefgh", f"gsk_{KEY}", "gsk_abcdefgh", f"r8_{KEY}", "r8_abcdefgh1234", f"my_ghp_{KEY}",
    f"sk_live_{KEY}", f"rk_live_{KEY}", f"sk_test_{KEY}", f"AIza{KEY}",
    f"pypi-{KEY}", "pypi-AgEIcHlwaS5vcmc", f"dckr_pat_{KEY}",
    f"SG.{KEY[:22]}.{KEY}", f"xoxc-1234567890-{KEY}", f"xoxb-{KEY}", f"xapp-1-{KEY}", "ASIA0123456789ABCDEF",
    "AKIA0123456789ABCDEF", f"tgp_{KEY}", f"tgp_v1_{KEY}", "AGE-SECRET-KEY-1QYQSZQGPQYQSZQGPQYQSZQGP",
    f"Bearer {KEY}", "Bearer x1y2", "bearer x1y2", "Basic dXNlcjpwYXNz", "Basic x", "-----BEGIN RSA PRIVATE KEY-----",
    "-----BEGIN OPENSSH PRIVATE KEY-----", "-----BEGIN PGP PRIVATE KEY BLOCK-----", "-----BEGIN PRIVATE KEY-----",
    "postgres://me:hunter2@host/db", "https://me:hunter2@proxy:3128", "redis://:hunter2@host",
    f"https://{KEY}@github.com/a/b",
    f"ghp_{KEY}", f"github_pat_{KEY}", f"glpat-{KEY[:20]}", f"gldt-{KEY[:20]}",
    f"sk-proj-{KEY}", f"sk-ant-api03-{KEY}", f"hf_{KEY}", "hf_FAULT9f8e7d6c5b4a", f"npm_{KEY}", f"whsec_{KEY}",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcdefgh", f"hvs.{KEY}", f"xai-{KEY}", f"pplx-{KEY}", f"GOCSPX-{KEY}",
    f"https://hooks.slack.com/services/T00000000/B00000000/{KEY}", f"AC{'0123456789abcdef' * 2}",
]  # fmt: skip
SECRET_PAIRS = [
    *(f"{name}=hunter2" for name in SECRET_NAMES), *(f"A={value}" for value in SECRET_VALUES),
    'model_loader_extra_config={"aws_secret_access_key": "hunter2"}', 'a={"b": [{"api_key":"hunter2"}]}',
    'a={"b": "{\\"api_key\\": \\"hunter2\\"}"}', 'a={"api\\u005fkey": "hunter2"}', 'a=["hf_FAULT9f8e7d6c5b4a"]',
    "ARGS=--api-key hunter2", "ARGS=--api-key=hunter2", "ARGS=-v --hf-token hunter2", "OPTS=host=x;password=hunter2",
    "OPTS=user: me password: hunter2", "HEADERS=Authorization: hunter2", "URL=https://host/blob?sig=hunter2",
    "api_key=true-hunter2", "api_key=1hunter2", "URL=http://h/v1?session=hunter2", "URL=http://h/v1?a=b%26api_key%3Dhunter2",
]  # fmt: skip
SECRET_URLS = [
    "http://h/v1?api_key=hunter2", "http://h/v1?apikeys=hunter2", "http://h/v1?access_tokens=hunter2",
    "http://h/v1?session=hunter2", "http://h/v1;api_key=hunter2", "http://h/v1?a=b;api_key=hunter2",
    "http://h/v1?a=b%26api_key%3Dhunter2", "http://h/v1%3Fapi_key=hunter2", "http://h/v1%253Fapi_key%253Dhunter2",
    "http://u%3Ahunter2%40h/v1", "http://u:hunter2@h/v1", "http://hunter2@h/v1", "http://h/v1?sig=hunter2",
    "http://h/v1?%61pi_key=hunter2", "http://h/v1#token=hunter2", "http://h/v1/t-0123456789abcdef0123456789abcdef/",
    f"http://h/v1/{KEY}", f"http://h/v1?k={KEY}", "http://h/v1?k=0123456789abcdef0123456789abcdef",
    f"http://h/hf_{KEY}/v1",     "http://h/v1?k=aB3-dE5_gH7-jK9_mN1-pQ3_rS5", "http://h/v1?sessionid=hunter2", "http://h/api_key=hunter2/v1",
    "http://h/v1?X-Amz-Signature=hunter2", "http://h/v1?X-Amz-Credential=hunter2", "http://h/v1?code=hunter2",
    "http://h/v1?apiKey=hunter2", "http://h/v1?auth=hunter2", "http://user:hunter2",
]  # fmt: skip
WRONG_URLS = ["http://h/v1 /hunter2", "http://h/v1%0d%0aX:hunter2", "http://h/v1%0Ahunter2", "http://h/%1b[2Jhunter2"]

# A hundred and more of them: variables and arguments with their values, then texts of other options, and URLs.
ORDINARY_PAIRS = """
    PYTHONPATH=/opt/vllm-0.26.0:/home/me/token-tools LD_LIBRARY_PATH=/usr/local/cuda-12.4/lib64
    CUDA_HOME=/usr/local/cuda VLLM_CACHE_ROOT=/tmp/cache-1 HF_HOME=/data/hf_models_cache
    HF_HUB_CACHE=/mnt/hf_transformers_2024/hub HF_HUB_OFFLINE=1 HF_HUB_DISABLE_IMPLICIT_TOKEN=1
    HF_HUB_ENABLE_HF_TRANSFER=1 HF_ENDPOINT=https://hf-mirror.com TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=8
    KMP_AFFINITY=granularity=fine,compact,1,0 NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=eth0 CUDA_LAUNCH_BLOCKING=1
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128 TORCH_CUDA_ARCH_LIST=9.0a VLLM_USE_V1=1
    VLLM_ATTENTION_BACKEND=FLASH_ATTN VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_LOGGING_LEVEL=DEBUG CXX=g++-12
    MAX_JOBS=4 CFLAGS=-O3 HTTPS_PROXY=http://proxy.example.com:3128 NO_PROXY=localhost,127.0.0.1,.example.com
    LANG=en_US.UTF-8 SSL_CERT_FILE=/etc/ssl/certs/ca.pem AUTHOR=me TOKEN_FILE=/run/secrets/token
    PASSWORD_FILE=/run/secrets/db KEY_PATH=/k max_num_seqs=256 max_num_batched_tokens=8192 max_model_len=4096
    tokenizer=meta-llama/Llama-3.1-8B-Instruct tokenizer_mode=auto skip_tokenizer_init=true trust_remote_code=true
    revision=a3f5c9d2e8b7410f6c5d4e3b2a190817f6e5d4c3 code_revision=9f8e7d6c5b4a39281706f5e4d3c2b1a098765432
    tokenizer_revision=main hf_token=true seed=42 dtype=bfloat16 quantization=awq kv_cache_dtype=fp8_e4m3
    load_format=safetensors download_dir=/data/hub enforce_eager=true gpu_memory_utilization=0.85 block_size=16
    swap_space=4 enable_prefix_caching=false enable_chunked_prefill=true
    hf_overrides={"rope_scaling":{"rope_type":"yarn","factor":4.0}}
    hf_overrides={"pad_token":"<pad>","eos_token_id":2}
    compilation_config={"level":3,"pass_config":{"enable_fusion":true},"cudagraph_capture_sizes":[1,2,4]}
    speculative_config={"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}
    kv_transfer_config={"kv_connector":"NixlConnector","kv_role":"kv_both"} override_generation_config={"top_k":20}
    limit_mm_per_prompt={"image":2} mm_processor_kwargs={"num_crops":4} chat_template=/data/templates/chatml.jinja
    served_model_name=qwen2.5-0.5b-instruct lora_modules=sql-lora=/data/lora
    attention_config={"backend":"FLASH_ATTN"} additional_config={"cache_key":"a","sort_key":"b"}
    generation_config=vllm otlp_traces_endpoint=http://localhost:4317 stop_token_ids=[1,2]
    return_tokens_as_token_ids=true max_logprobs=20 model_impl=auto bytes_per_token=2 decode_s=0.5
    logits_processors=["my.package:Processor"] scheduler_cls=my.module.Scheduler
    uuid=123e4567-e89b-12d3-a456-426614174000 cpu_offload_gb=2 image_token=<image> batching=dynamic wait_s=0.05
    VLLM_HOST_IP=10.0.0.12 RAY_ADDRESS=node-1:6379 NVIDIA_VISIBLE_DEVICES=GPU-8f0c1a9e-2b3d-4c5e-9f7a-1b2c3d4e5f60
    GIT_COMMIT=e83c5163316f89bfbde7d9ab23ca2e25604af290
""".split()  # noqa: SIM905
ORDINARY_TEXTS = """
    meta-llama/Llama-3.1-8B-Instruct Qwen/Qwen2.5-0.5B-Instruct facebook/opt-125m mistralai/Mistral-7B-v0.3
    opt-125m,opt-1.3b HuggingFaceTB/SmolLM2-360M-Instruct /data/models/hf_checkpoints ./models/key-value-net
    results/2026-01-31/r.jsonl.gz .slm/records.jsonl /home/me/tests/test_tokens.py::test_key[hf-auto]
    runs/e83c5163316f89bfbde7d9ab23ca2e25604af290.jsonl vllm-bench=out/ ttft:200ms,tpot:50ms,e2e:5s
    tflops=989,gbps=3350 40GiB 1,2,4,8 dcgm=node-1:5555 accelerator_type:H200
    candidate:python=/opt/vllm-0.27/bin/python baseline:env=PYTHONPATH=/opt/a,arg=max_num_seqs=64 10.0.0.1:6379
    natural sharegpt_vicuna_cleaned.json tokenizer.json pplx-7b-online adapters/lora_r8_alpha16
    jinaai/jina-embeddings-v3 pypi-mirror-cache-2 task-abcdefgh nvidia/Nemotron-H-8B-Base-8K
    ibm-granite/granite-3.1-2b-instruct http://127.0.0.1:9400/metrics vllm-project/vllm
""".split()  # noqa: SIM905
ORDINARY_WORDS = [
    "TestBasic and not slow",
    "basic and token",
    "bearer or key",
    "not (api_key or password)",
    "slm and not secret",
]
ORDINARY_URLS = """
    http://127.0.0.1:8000/v1 http://localhost:8000/v1/completions https://api.openai.com/v1/chat/completions
    https://host/openai/deployments/gpt-4o-mini-2024-07-18/chat/completions?api-version=2024-02-15-preview
    https://abc123def456ghij.us-east-1.aws.endpoints.huggingface.cloud/v1 http://[::1]:8000/v1 http://h/generate
    http://h/v1/models/Meta-Llama-3.1-8B-Instruct https://h/v1?revision=e83c5163316f89bfbde7d9ab23ca2e25604af290
    http://h/v1?max_tokens=1#author http://h/123e4567-e89b-12d3-a456-426614174000/v1 http://h/v1?model=llama-3-8b
    http://h/my%20model/v1 http://h/%C3%A9/v1 http://10.0.0.12:30000/gateway/v1?version=2
    http://h/v1?deployment=a1b2c3
""".split()  # noqa: SIM905


def repeats(text: str) -> bool:
    """Whether a text has one of these secrets."""
    return any(mark in text for mark in MARKS)
