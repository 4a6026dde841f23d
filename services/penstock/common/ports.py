"""Default ports. Metrics stay clear of 9090, which is Prometheus's own."""

ROUTER_PORT, TOKENIZER_PORT, GENERATION_PORT = 50050, 50051, 50052
ROUTER_METRICS_PORT, TOKENIZER_METRICS_PORT, GENERATION_METRICS_PORT = 9100, 9101, 9102
# Tried after a service's own when nobody chose a port: 9100 is also that of Prometheus's node_exporter.
NEXT_METRICS_PORTS = range(9103, 9200)
# The HTTP gateway's port: the usual one of other servers for OpenAI clients.
HTTP_PORT = 8000
