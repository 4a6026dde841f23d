{{/* Names, labels and ports. Most take (dict "root" $ "name" SERVICE). */}}

{{- define "penstock.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "penstock.name" -}}
{{ include "penstock.fullname" .root }}-{{ .name }}
{{- end -}}

{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "penstock.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "penstock.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{/* The services that run, as a list. */}}
{{- define "penstock.services" -}}
{{- if not (or .Values.generation.enabled .Values.vllm.enabled) }}{{ fail "generation.enabled: the router needs a backend: set it, or vllm.enabled" }}{{ end -}}
{{- ternary (list "tokenizer" "generation" "router") (list "tokenizer" "router") .Values.generation.enabled | toJson -}}
{{- end -}}

{{/* Service of the leaders of groups of vLLM. LeaderWorkerSet makes one of the set's own name, with all pods. */}}
{{- define "penstock.leaders" -}}
{{ include "penstock.name" (dict "root" . "name" "vllm") }}-leaders
{{- end -}}

{{- define "penstock.components" -}}
{{- $names := include "penstock.services" . | fromJsonArray -}}
{{- ternary (append $names "gateway") $names .Values.gateway.enabled | toJson -}}
{{- end -}}

{{/* Port that callers use, and its name. */}}
{{- define "penstock.port" -}}
{{- get (dict "router" "50050" "tokenizer" "50051" "generation" "50052" "gateway" "8000" "vllm" "8000") .name -}}
{{- end -}}

{{- define "penstock.portName" -}}
{{- ternary "http" "grpc" (eq .name "gateway") -}}
{{- end -}}

{{/* Port of metrics; the gateway has one port for everything. */}}
{{- define "penstock.metricsPort" -}}
{{- get (dict "router" "9100" "tokenizer" "9101" "generation" "9102" "gateway" "8000") .name -}}
{{- end -}}

{{- define "penstock.metricsPortName" -}}
{{- ternary "http" "metrics" (eq .name "gateway") -}}
{{- end -}}

{{/* Port of JobsService; empty: none. */}}
{{- define "penstock.jobsPort" -}}
{{- if and (eq .name "gateway") (gt (int .root.Values.gateway.jobsPort) 0) -}}
{{- if eq (int .root.Values.gateway.jobsPort) 8000 }}{{ fail "gateway.jobsPort: 8000 is the port of HTTP" }}{{ end -}}
{{- int .root.Values.gateway.jobsPort -}}
{{- end -}}
{{- end -}}
