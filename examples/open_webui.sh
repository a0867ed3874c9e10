# The settings of Open WebUI for a server: sh open_webui.sh [URL]
#
# Install it with `pip install open-webui`, and start the server with `quantkit serve MODEL`. If the server has a key,
# set OPENAI_API_KEY to it. Then open http://127.0.0.1:8080.

export OPENAI_API_BASE_URL="${1:-http://127.0.0.1:8000/v1}"
export OPENAI_API_KEY="${OPENAI_API_KEY:-none}"
export ENABLE_OLLAMA_API=False
export ENABLE_PERSISTENT_CONFIG=False # else a second start uses what the first one saved
exec open-webui serve --host 127.0.0.1 --port 8080
