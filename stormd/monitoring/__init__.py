"""What operators see: metrics, health, logs, profiler ranges."""
