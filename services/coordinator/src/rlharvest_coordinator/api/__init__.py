"""REST, the OpenAI mapping, gRPC Jobs: what the coordinator shows. `api.app.create_app` puts it together."""
