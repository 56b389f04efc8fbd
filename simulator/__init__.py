"""What happens to a trace: trace model, devices, layouts, runtime, replay, metrics and plots."""
