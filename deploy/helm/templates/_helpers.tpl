{{/* The prefix of every object's name: the release, or `fullnameOverride`. */}}
{{- define "baton.name" -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{/* The labels by which pods of one component are selected. They must not change between upgrades. Takes (list root component). */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ (index . 0).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The labels of every object of one component. Takes (list root component). */}}
{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end -}}

{{/* The ConfigMap with the pool file: the chart's own, or the one that is named, or none. */}}
{{- define "baton.poolConfigMap" -}}
{{- if .Values.pool.text -}}
{{ include "baton.name" . }}-pool
{{- else -}}
{{ .Values.pool.existingConfigMap }}
{{- end -}}
{{- end -}}

{{/* The annotations of pods. A changed pool file starts gateways and engines anew, because its checksum is one of them. Takes (list root component). */}}
{{- define "baton.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
{{- $all := merge (dict) $own.podAnnotations $root.Values.podAnnotations -}}
{{- if and $root.Values.pool.text (ne (index . 1) "migrate") -}}
{{- $all = set $all "checksum/pool" (sha256sum $root.Values.pool.text) -}}
{{- end -}}
{{- with $all }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* What every pod has in common. The migration has no pool file: it needs none, and it runs before the ConfigMap of a first release exists. Takes (list root component). */}}
{{- define "baton.podSpec" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
enableServiceLinks: false  # a Service called baton would set BATON_PORT
automountServiceAccountToken: false
serviceAccountName: {{ $root.Values.serviceAccountName | default "default" | quote }}
terminationGracePeriodSeconds: {{ add $root.Values.drainSeconds $root.Values.preStopSeconds 35 }}  # running requests and steps get 25 s
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if ne (index . 1) "migrate" }}
topologySpreadConstraints:
  {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ $key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "baton.selector" (list $root (index $ 1)) | nindent 8 }}
  {{- end }}
{{- end }}
volumes:
  - {name: data, emptyDir: {}}
  - {name: tmp, emptyDir: {}}
  {{- if and (ne (index . 1) "migrate") (include "baton.poolConfigMap" $root) }}
  - {name: pool, configMap: {name: {{ include "baton.poolConfigMap" $root | quote }}}}
  {{- end }}
  {{- with $root.Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* What every container has in common; the database's and the providers' secrets come from Secrets that exist. Takes (list root component). */}}
{{- define "baton.container" -}}
{{- $root := index . 0 -}}
{{- $own := index $root.Values (index . 1) -}}
image: "{{ $root.Values.image.repository }}{{ if $root.Values.image.digest }}@{{ $root.Values.image.digest }}{{ else }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}{{ end }}"
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
envFrom:
  - secretRef: {name: {{ $root.Values.secret | quote }}}
  {{- range $root.Values.extraSecrets }}
  - secretRef: {name: {{ . | quote }}}
  {{- end }}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: data, mountPath: /var/lib/baton}
  - {name: tmp, mountPath: /tmp}
  {{- if and (ne (index . 1) "migrate") (include "baton.poolConfigMap" $root) }}
  - {name: pool, mountPath: /etc/baton, readOnly: true}
  {{- end }}
  {{- with $root.Values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources:
  {{- toYaml $own.resources | nindent 2 }}
{{- end -}}

{{/* The variables that every process gets. `extraEnv` comes last, so that it may replace one. Takes the root. */}}
{{- define "baton.env" -}}
{{- if include "baton.poolConfigMap" . }}
- {name: BATON_POOL, value: /etc/baton/pool.toml}
{{- end }}
- {name: BATON_LOG_LEVEL, value: {{ .Values.logLevel | quote }}}
- {name: BATON_LOG_REQUESTS, value: {{ .Values.logRequests | quote }}}
- {name: BATON_METRICS_HOST, value: "0.0.0.0"}
- {name: BATON_METRICS_PORT, value: {{ .Values.metricsPort | quote }}}
- {name: BATON_DRAIN_SECONDS, value: {{ .Values.drainSeconds | quote }}}
{{- include "baton.adminEnv" . }}
{{- with .Values.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The listener of administration, for every process: only gateways have one, but each checks the settings of logins, which need it. Takes the root. */}}
{{- define "baton.adminEnv" -}}
{{- if .Values.admin.enabled }}
- {name: BATON_ADMIN_HOST, value: "0.0.0.0"}
- {name: BATON_ADMIN_PORT, value: {{ .Values.admin.port | quote }}}
{{- with .Values.admin.url }}
- {name: BATON_ADMIN_URL, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{/* The lifecycle of a pod that serves: it leaves the Service before it is told to stop, so that no request is sent to it later. */}}
{{- define "baton.lifecycle" -}}
{{- if gt (int .Values.preStopSeconds) 0 -}}
lifecycle:
  preStop:
    exec: {command: [/opt/venv/bin/python, -I, -c, "import time; time.sleep({{ .Values.preStopSeconds }})"]}
{{- end -}}
{{- end -}}
