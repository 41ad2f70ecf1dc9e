"""What processes of ours inherit: all they work with, and no secrets."""

import pytest

from pytest_slmserve.schema.printable import passed_on

WANTED = """
    PATH HOME USER LANG LC_ALL TMPDIR XDG_CACHE_HOME XDG_RUNTIME_DIR LD_LIBRARY_PATH LD_PRELOAD PYTHONPATH
    PYTHONHASHSEED CUDA_VISIBLE_DEVICES CUDA_HOME NVIDIA_VISIBLE_DEVICES NCCL_DEBUG OMP_NUM_THREADS KMP_AFFINITY
    TORCH_HOME TORCHINDUCTOR_CACHE_DIR PYTORCH_CUDA_ALLOC_CONF TRITON_CACHE_DIR VLLM_ATTENTION_BACKEND VLLM_CACHE_ROOT
    HF_HOME HF_HUB_OFFLINE HF_ENDPOINT TRANSFORMERS_CACHE TOKENIZERS_PARALLELISM http_proxy HTTPS_PROXY no_proxy
    SSL_CERT_FILE REQUESTS_CA_BUNDLE CC MAX_JOBS VIRTUAL_ENV COVERAGE_PROCESS_START RAY_TMPDIR
""".split()  # noqa: SIM905
SECRET = """
    SLM_ENDPOINT_KEY GITHUB_TOKEN GITHUB_OUTPUT GITHUB_ENV GITHUB_STEP_SUMMARY GH_TOKEN ACTIONS_RUNTIME_TOKEN
    ACTIONS_ID_TOKEN_REQUEST_TOKEN AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET
    GOOGLE_APPLICATION_CREDENTIALS OPENAI_API_KEY VLLM_API_KEY WANDB_API_KEY SSH_AUTH_SOCK DATABASE_URL MY_PASSWORD
    RAY_AUTH_TOKEN KUBECONFIG
""".split()  # noqa: SIM905


def test_what_engines_work_with_is_inherited():
    inherited = dict.fromkeys(WANTED, "x")
    assert passed_on(inherited) == inherited | {"PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize("hub", [False, True])
def test_secrets_and_the_files_of_a_workflow_are_not(hub):
    assert passed_on(dict.fromkeys(SECRET, "x"), hub=hub) == {"PYTHONSAFEPATH": "1"}


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_TOKEN"])
def test_a_token_of_the_hub_is_for_real_weights_alone(name):
    assert name not in passed_on({name: "hf_x"})
    assert passed_on({name: "hf_x"}, hub=True)[name] == "hf_x"
