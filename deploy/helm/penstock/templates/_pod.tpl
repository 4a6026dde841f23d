{{/* Parts of a pod. All take (dict "root" $ "name" SERVICE). */}}

{{/* Numbers of values are floats: 1000000 must not become 1e+06. */}}
{{- define "penstock.flagValue" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{- define "penstock.options" -}}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}
- {{ printf "--%s%s" (ternary "" "no-" $value) $flag | quote }}
{{- else }}
- {{ printf "--%s=%s" $flag (include "penstock.flagValue" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Model, as tokenizer and generation take it. */}}
{{- define "penstock.model" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "hub" -}}
{{- required "model.name: the hub id that model.source hub needs" $model.name -}}
{{- else if has $model.source (list "pvc" "image") -}}
/models{{ with $model.name }}/{{ . }}{{ end }}
{{- end -}}
{{- end -}}

{{/* Targets of --backend, as a list. */}}
{{- define "penstock.backends" -}}
{{- $values := .Values -}}
{{- $targets := list -}}
{{- $places := list -}}
{{- if $values.generation.enabled -}}
{{- $places = append $places (list "" (include "penstock.name" (dict "root" . "name" "generation")) (include "penstock.port" (dict "name" "generation"))) -}}
{{- end -}}
{{- if $values.vllm.enabled -}}
{{- $places = append $places (list "vllm" (include "penstock.leaders" .) (include "penstock.port" (dict "name" "vllm"))) -}}
{{- end -}}
{{- range $places -}}
{{- $engine := index . 0 -}}
{{- if eq $values.router.discovery "endpoints" -}}
{{- $targets = append $targets (printf "%sk8s://%s/%s:grpc" (ternary (printf "%s+" $engine) "" (ne $engine "")) $.Release.Namespace (index . 1)) -}}
{{- else -}}
{{- $targets = append $targets (printf "%s%s:%s" (ternary (printf "%s://" $engine) "" (ne $engine "")) (index . 1) (index . 2)) -}}
{{- end -}}
{{- end -}}
{{- $targets | toJson -}}
{{- end -}}

{{- define "penstock.args" -}}
{{- $values := .root.Values -}}
{{- $served := has .name (list "tokenizer" "generation") -}}
{{- if $served }}
{{- with include "penstock.model" .root }}
- {{ quote . }}
{{- end }}
{{- with $values.model.servedName }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- end }}
- --host=0.0.0.0
- --port={{ include "penstock.port" . }}
- --drain-grace-seconds={{ include "penstock.flagValue" $values.drain.graceSeconds }}
- --log-format=json
- --log-level={{ $values.log.level }}
{{- if ne .name "gateway" }}
- --metrics-port={{ include "penstock.metricsPort" . }}
- --health-socket=/tmp/penstock-health.sock
{{- end }}
{{- if eq .name "router" }}
- --tokenizer={{ include "penstock.name" (dict "root" .root "name" "tokenizer") }}:{{ include "penstock.port" (dict "name" "tokenizer") }}
- --backend={{ include "penstock.backends" .root | fromJsonArray | join "," }}
{{- end }}
{{- if eq .name "gateway" }}
- --router={{ include "penstock.name" (dict "root" .root "name" "router") }}:{{ include "penstock.port" (dict "name" "router") }}
{{- with include "penstock.jobsPort" . }}
- --jobs-port={{ . }}
{{- end }}
{{- end }}
{{- if and (eq .name "generation") $values.generationPool.enabled }}
- --vllm-engine
{{- end }}
{{- if and (eq .name "generation") (or $values.generation.adapters.claimName $values.generation.adapters.stores) }}
- --adapter-root=/adapters
{{- with $values.generation.adapters.stores }}
- {{ printf "--adapter-store=%s" . | quote }}
- {{ printf "--adapter-disk=%s" $values.generation.adapters.disk | quote }}
{{- end }}
{{- end }}
{{- if not $served }}
- --start-timeout-seconds={{ include "penstock.flagValue" (index $values .name).startSeconds }}
{{- end }}
{{- if $values.tls.enabled }}
- --tls-cert=/etc/penstock/tls/tls.crt
- --tls-key=/etc/penstock/tls/tls.key
{{- if $values.tls.clientCertificates }}
- --tls-client-ca=/etc/penstock/tls/ca.crt
{{- end }}
{{- if not $served }}
- --channel-tls-ca=/etc/penstock/tls/ca.crt
{{- if $values.tls.clientCertificates }}
- --channel-tls-cert=/etc/penstock/tls/tls.crt
- --channel-tls-key=/etc/penstock/tls/tls.key
{{- end }}
- {{ printf "--channel-tls-server-name=%s" $values.tls.serverName | quote }}
{{- end }}
{{- else }}
- --insecure-bind
{{- end }}
{{- if $values.auth.tokenSecret }}
{{- if eq .name "gateway" }}
{{- if not $values.inferencePool.enabled }}
- --metrics-token-file=/etc/penstock/auth/token
{{- end }}
{{- else }}
- --auth-token-file=/etc/penstock/auth/token
{{- end }}
{{- if eq .name "router" }}
- --channel-token-file=/etc/penstock/auth/token
{{- end }}
{{- end }}
{{- if and (eq .name "router") $values.auth.keysSecret }}
- --keys-file=/etc/penstock/keys/keys.toml
{{- end }}
{{- if and (eq .name "gateway") $values.inferencePool.enabled $values.inferencePool.hostnames }}
- --allowed-hosts={{ range $number, $host := $values.inferencePool.hostnames }}{{ if $number }},{{ end }}{{ $host.name }}{{ end }}
{{- end }}
{{- include "penstock.options" (index $values .name).options }}
{{- end -}}

{{/* Health: is it ready for requests? */}}
{{- define "penstock.healthProbe" -}}
{{- $values := .root.Values -}}
{{- if eq .name "gateway" }}
{{- if and $values.tls.enabled $values.tls.clientCertificates }}
exec:
  command:
    - /opt/penstock/bin/python
    - -I
    - -c
    - |
      import ssl, urllib.request
      tls = ssl.create_default_context(cafile="/etc/penstock/tls/ca.crt")
      tls.check_hostname = False
      tls.load_cert_chain("/etc/penstock/tls/tls.crt", "/etc/penstock/tls/tls.key")
      urllib.request.urlopen("https://127.0.0.1:8000/health", context=tls, timeout=4)
{{- else }}
httpGet:
  path: /health
  port: http
  scheme: {{ ternary "HTTPS" "HTTP" $values.tls.enabled }}
{{- end }}
{{- else if or (eq $values.probes.kind "exec") (and (eq $values.probes.kind "auto") $values.tls.enabled) }}
exec:
  command:
    - /opt/penstock/bin/python
    - -I
    - -S
    - /opt/penstock/bin/health_probe.py
    - /tmp/penstock-health.sock
{{- else }}
{{- if $values.tls.enabled }}{{ fail "probes.kind: the kubelet's grpc probe speaks no TLS: take exec or auto with tls.enabled" }}{{ end }}
grpc:
  port: {{ include "penstock.port" . }}
{{- end }}
{{- end -}}

{{/* Life: does the process answer at all? */}}
{{- define "penstock.lifeProbe" -}}
{{- if or (eq .name "gateway") (and .root.Values.tls.enabled .root.Values.tls.clientCertificates) }}
tcpSocket:
  port: {{ include "penstock.portName" . }}
{{- else }}
httpGet:
  path: /healthz
  port: metrics
  scheme: {{ ternary "HTTPS" "HTTP" .root.Values.tls.enabled }}
{{- end }}
{{- end -}}

{{- define "penstock.probes" -}}
{{- $service := index .root.Values .name -}}
startupProbe:
  {{- include "penstock.healthProbe" . | trim | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int $service.startSeconds) 5) }}
readinessProbe:
  {{- include "penstock.healthProbe" . | trim | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- if and (eq .name "generation") (gt (int $service.restartSeconds) 0) }}
  {{- include "penstock.healthProbe" . | trim | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ max 1 (div (int $service.restartSeconds) 10) }}
  {{- else }}
  {{- include "penstock.lifeProbe" . | trim | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
  {{- end }}
{{- end -}}

{{- define "penstock.env" -}}
{{- $hub := .root.Values.model.hub -}}
{{- if and (has .name (list "tokenizer" "generation" "vllm")) (eq .root.Values.model.source "hub") }}
- name: HF_HOME
  value: /cache/huggingface
{{- if $hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $hub.tokenSecret }}
      key: {{ $hub.tokenKey }}
{{- end }}
{{- end }}
{{- with (index .root.Values .name).env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Pairs: what a pod has, and where its container mounts it. */}}
{{- define "penstock.volumes" -}}
{{- $values := .root.Values -}}
{{- $model := $values.model -}}
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
{{- if has .name (list "tokenizer" "generation" "vllm") }}
{{- if eq $model.source "hub" }}
- name: hub
  {{- if $model.hub.cacheClaim }}
  persistentVolumeClaim:
    claimName: {{ $model.hub.cacheClaim }}
  {{- else if $model.hub.cacheLimit }}
  emptyDir:
    sizeLimit: {{ $model.hub.cacheLimit }}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- else if eq $model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ required "model.pvc.claimName: the claim that model.source pvc needs" $model.pvc.claimName }}
    readOnly: true
{{- else if eq $model.source "image" }}
- name: model
  image:
    reference: {{ required "model.image.reference: the image that model.source image needs" $model.image.reference }}
    pullPolicy: {{ $values.images.pullPolicy }}
{{- end }}
{{- end }}
{{- with dig "sharedMemory" "" (index $values .name) }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- if eq .name "generation" }}
{{- if $values.generation.adapters.claimName }}
- name: adapters
  persistentVolumeClaim:
    claimName: {{ $values.generation.adapters.claimName }}
{{- else if $values.generation.adapters.stores }}
- name: adapters
  emptyDir: {}
{{- end }}
{{- range $number, $place := $values.generation.hostPaths }}
- name: host-{{ $number }}
  hostPath:
    path: {{ $place.path }}
{{- end }}
{{- end }}
{{- if $values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ required "tls.secretName: the secret that tls.enabled needs" $values.tls.secretName }}
    defaultMode: 0440
{{- end }}
{{- if and $values.auth.tokenSecret (ne .name "vllm") }}
- name: auth
  secret:
    secretName: {{ $values.auth.tokenSecret }}
    defaultMode: 0440
    items:
      - key: {{ $values.auth.tokenKey }}
        path: token
{{- end }}
{{- if and $values.auth.keysSecret (eq .name "router") }}
- name: keys
  secret:
    secretName: {{ $values.auth.keysSecret }}
    defaultMode: 0440
    items:
      - key: {{ $values.auth.keysKey }}
        path: keys.toml
{{- end }}
{{- end -}}

{{- define "penstock.mounts" -}}
{{- $places := dict "tmp" "/tmp" "home" "/home/penstock" "hub" "/cache" "model" "/models" "adapters" "/adapters" "shared-memory" "/dev/shm" "tls" "/etc/penstock/tls" "auth" "/etc/penstock/auth" "keys" "/etc/penstock/keys" -}}
{{- range include "penstock.volumes" . | fromYamlArray }}
- name: {{ .name }}
  mountPath: {{ get $places .name | default (dig "hostPath" "path" "" .) }}
  {{- if or (has .name (list "model" "tls" "auth")) .hostPath (and (eq .name "adapters") (not $.root.Values.generation.adapters.stores)) }}
  readOnly: true
  {{- end }}
{{- end }}
{{- end -}}
