"""Endpoints of Kubernetes services, read and watched through the cluster's API."""
