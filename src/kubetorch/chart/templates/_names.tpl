{{/* Labels that select the controller's pods. They can never change. */}}
{{- define "kubetorch.selector" -}}
app.kubernetes.io/name: kubetorch
app.kubernetes.io/component: controller
{{- end }}

{{/* Labels of every object. */}}
{{- define "kubetorch.labels" -}}
app.kubernetes.io/name: kubetorch
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
kubetorch.com/install-namespace: {{ .Release.Namespace | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The references of the two images, from repository, tag and digest. */}}
{{- define "kubetorch.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}
{{- define "kubetorch.podImage" -}}
{{- with .Values.podImage -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* What lies in no namespace has the namespace of the installation in its name. */}}
{{- define "kubetorch.clusterName" -}}
kubetorch-controller.{{ .Release.Namespace }}
{{- end }}

{{- /* Rules for whatever a service may consist of. */}}
{{- define "kubetorch.kindRules" -}}
# What a deploy applies, and what a teardown deletes.
- apiGroups: [""]
  resources: [pods, services]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets, replicasets, daemonsets]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [batch]
  resources: [jobs, cronjobs]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [serving.knative.dev]
  resources: [services]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [kubeflow.org]
  resources: [pytorchjobs, tfjobs, mxjobs, xgboostjobs, jaxjobs, mpijobs]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [trainer.kubeflow.org]
  resources: [trainjobs, trainingruntimes]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [jobset.x-k8s.io]
  resources: [jobsets]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, update, patch, delete]
{{- end }}

{{/* What the controller may do in the namespaces of workloads. */}}
{{- define "kubetorch.workloadRules" -}}
# Its own records.
- apiGroups: [kubetorch.com]
  resources: [kubetorchworkloads]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [kubetorch.com]
  resources: [kubetorchworkloads/status, kubetorchworkloads/finalizers]
  verbs: [get, update, patch]
{{ include "kubetorch.kindRules" . }}
- apiGroups: [""]
  resources: [serviceaccounts, secrets, persistentvolumeclaims]
  verbs: [get, list, watch, create, update, patch, delete]
# The rights of a workload's own service account. It can grant these roles and no other.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings]
  verbs: [get, list, watch, create, update, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [clusterroles]
  verbs: [bind]
  resourceNames: [kubetorch-edit, kubetorch-view]
# The Services of autoscaled services without a pod lead to the controller.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch, create, update, patch, delete]
# Why a pod does not start, what it said, and what would let it start.
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods/log, resourcequotas, limitranges]
  verbs: [get, list, watch]
- apiGroups: [serving.knative.dev]
  resources: [revisions, configurations, routes]
  verbs: [get, list, watch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads, localqueues]
  verbs: [get, list, watch]
{{- with .Values.rbac.extraRules }}
{{ toYaml . }}
{{- end }}
{{- end }}
